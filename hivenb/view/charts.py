"""The dashboard's picture: one snapshot in, one PNG out.

Drawn without pyplot, so that a background thread may draw while the user plots something else, and without a style of
the user's, which may change at any moment and may ask for TeX.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hivenb.figures.history import Event, Snapshot
from hivenb.view import theme
from hivenb.view.drawing_surface import Box, DrawingSurface, TextStyle
from hivenb.view.horizontal_axis import ToAxis, to_axis
from hivenb.view.panels import Line, Mark, Panel, limits, logarithm, merged, panels, smoothed, with_gaps
from hivenb.view.ticks import byte_ticks, log_ticks, number_ticks, time_ticks

WIDTH, HEIGHT, DPI = 7.4, 5.0, 150

_LEFT, _RIGHT, _TOP, _BOTTOM = 0.56, 0.14, 0.33, 0.26  # inches of margin around the axes of a panel
_SHORTEST = 10.0  # seconds of time axis before anything has happened
_HEIGHTS = (0.40, 0.31, 0.29)  # of the rows, as shares of the picture
_WIDTHS = {1: (1.0,), 2: (0.57, 0.43), 3: (0.35, 0.35, 0.30)}  # of a row's panels, by their number
_MOST_MARKS, _MARK_ROWS = 40, 3
_LEGEND_ROW = 0.17  # inches
_HOLDS = 3.0  # seconds for which the last value of a step counts on, at most
_TITLE, _LEGEND, _TICK, _MARK = 9.5, 8.5, 7.5, 7.0  # points


class ChartImage:
    """Turns snapshots into PNGs, on one surface that is used again and again. For one thread at a time.

    :param width: inches
    :param height: inches
    :param dpi: pixels an inch
    """

    def __init__(self, width: float = WIDTH, height: float = HEIGHT, dpi: int = DPI) -> None:
        self._surface = DrawingSurface(width, height, dpi)

    def png(self, snapshot: Snapshot, *, axis: str = "time", log: bool = False, dark: bool = False) -> bytes:
        """The picture of a snapshot; equal snapshots give equal bytes.

        :param axis: what loss and metric are drawn against: ``"time"``, ``"epochs"`` or ``"samples"``
        :param log: a logarithmic scale for the loss
        :param dark: light ink on dark paper
        """
        draw(snapshot, self._surface, axis=axis, log=log, dark=dark)
        return self._surface.png()


def draw(
    snapshot: Snapshot, surface: DrawingSurface, *, axis: str = "time", log: bool = False, dark: bool = False
) -> None:
    """Draw a snapshot over whatever the surface showed before; :func:`hivenb.view.panels.panels` says what it shows.

    Through all panels goes a thin line wherever an event was marked, with a word in the panel that it belongs to.
    """
    colors = theme.DARK if dark else theme.LIGHT
    surface.clear(colors.paper)
    times = [float(s.times[-1]) for s in snapshot.series.values() if len(s)]
    now = max([0.0, *times, *(event.time for event in snapshot.events)])
    top = float(surface.height)
    for row, share in zip(panels(snapshot, axis, log), _HEIGHTS, strict=True):
        bottom, left = top - share * surface.height, 0.0
        for panel, width in zip(row, _WIDTHS[len(row)], strict=True):
            right = left + width * surface.width
            _PanelDrawing(surface, colors, Box(left, bottom, right, top), to_axis(snapshot, panel.axis), now).draw(
                panel, snapshot.events
            )
            left = right
        top = bottom


class _PanelDrawing:
    """One panel in its place on the surface."""

    def __init__(self, surface: DrawingSurface, colors: theme.Theme, place: Box, to_x: ToAxis, now: float):
        self._surface, self._colors, self._to_x, self._now = surface, colors, to_x, now
        inch = surface.inch
        self._place = place
        self._axes = Box(
            place.left + _LEFT * inch, place.bottom + _BOTTOM * inch, place.right - _RIGHT * inch,
            place.top - _TOP * inch,
        )  # fmt: skip
        self._low, self._high = 0.0, 1.0
        self._start, self._end = 0.0, 1.0

    def draw(self, panel: Panel, events: Sequence[Event]) -> None:
        self._write_title(panel)
        axes, colors = self._axes, self._colors
        floor = (axes.left, axes.bottom), (axes.right, axes.bottom)
        if not panel.lines:
            self._surface.segments([floor[0]], [floor[1]], colors.frame, width=0.8)
            self._write_empty(panel.empty)
            return
        first, last = (float(x) for x in self._to_x(np.array([0.0, self._now])))
        shortest = _SHORTEST if panel.axis == "time" else 1.0
        self._start, self._end = first, first + max(last - first, shortest) * 1.02
        self._low, self._high = limits(panel)
        events = [replace(event, time=float(self._to_x(np.array([event.time]))[0])) for event in events]
        near = 0.01 * (self._end - self._start)
        marks = merged([event for event in events if event.kind in panel.marks], near)[-_MOST_MARKS:]
        if marks:
            self._high += 0.22 * (self._high - self._low)  # room for the words
        self._draw_ticks(panel)
        if panel.stacked:
            self._draw_shares(panel.lines)
        else:
            starts = np.array([event.time for event in events if event.kind == "run"])
            for line in panel.lines:
                self._draw_line(line, panel.log, starts)
        for event in events[-_MOST_MARKS:]:
            strength = 0.75 if event.kind in panel.marks else 0.3
            x = self._x(event.time)
            color = colors.hue(theme.EVENTS[event.kind])
            self._surface.segments([(x, axes.bottom)], [(x, axes.top)], color, width=0.8, alpha=strength)
        self._surface.segments([floor[0]], [floor[1]], colors.frame, width=0.8)
        self._write_marks(marks)

    def _x(self, place: Any) -> Any:
        return self._axes.left + (place - self._start) / (self._end - self._start) * self._axes.width

    def _y(self, place: Any) -> Any:
        # a pixel far outside is as good as one further outside, and Agg's coordinates have a limit
        share = np.clip((place - self._low) / (self._high - self._low), -10, 10)
        return self._axes.bottom + share * self._axes.height

    def _draw_line(self, line: Line, log: bool, starts: np.ndarray) -> None:
        surface, within = self._surface, self._axes
        color = self._colors.hue(line.color)

        def scaled(values: np.ndarray) -> np.ndarray:
            return logarithm(values) if log else np.where(np.isfinite(values), values, np.nan)

        places, values = self._to_x(line.points.times), line.points.values
        if line.step:
            now = float(self._to_x(np.array([self._now]))[0])
            end = np.clip(now, places[-1], places[-1] + _HOLDS)
            x, y = with_gaps(np.append(places, end), np.append(values, values[-1]), starts, held=True)
            x, y = _steps(self._x(x), self._y(scaled(y)))
            surface.area(x, within.bottom, y, color, alpha=0.10, within=within)
            surface.line(x, y, color, width=1.6, within=within)
            return
        if np.any(line.points.highs > line.points.lows):
            x, low = with_gaps(places, line.points.lows, starts)
            high = with_gaps(places, line.points.highs, starts)[1]
            low, high = scaled(low), scaled(high)
            if log:  # a mean can have a logarithm where the least of its values has none
                low = np.where(np.isnan(low), self._low, low)
            surface.area(self._x(x), self._y(low), self._y(high), color, alpha=0.16, within=within)
        if line.smooth and len(values) >= 40:
            x, y = with_gaps(places, values, starts)
            surface.line(self._x(x), self._y(scaled(y)), color, width=0.7, alpha=0.30, within=within)
            values = smoothed(values, np.searchsorted(places, starts))
        x, y = with_gaps(places, values, starts)
        x, y = self._x(x), self._y(scaled(y))
        surface.line(x, y, color, width=1.6, within=within, dashes=(4, 2) if line.dashed else None)
        known = np.flatnonzero(np.isfinite(y))
        if len(values) <= 40 and not line.smooth:
            surface.dots(x[known], y[known], color, size=3.0)
        surface.dots(x[known[-1:]], y[known[-1:]], color, size=4.0)

    def _draw_shares(self, lines: Sequence[Line]) -> None:
        below: Any = 0.0
        for line in lines:
            places, above = self._x(line.points.times), below + line.points.values
            (x, low), (_, high) = (_steps(places, self._y(edge + 0 * above)) for edge in (below, above))
            self._surface.area(x, low, high, self._colors.hue(line.color), alpha=0.75, within=self._axes)
            below = above

    def _draw_ticks(self, panel: Panel) -> None:
        surface, axes, colors = self._surface, self._axes, self._colors
        style = TextStyle(_TICK, colors.faint_ink)
        gap = 5 * surface.point
        most = max(2, int(axes.width / surface.inch / 0.55))
        if panel.axis == "time":
            places, labels = time_ticks(self._end, most)
        else:
            places, labels = number_ticks(self._start, self._end, most, whole=True)
            labels[:1] = [f"{panel.axis.removesuffix('s')} {label}" for label in labels[:1]]
        for place, label in zip(places, labels, strict=True):
            surface.write(label, self._x(place), axes.bottom - gap, style, across="center", up="top")
        most = max(2, int(axes.height / surface.inch / 0.28))
        if panel.log:
            places, labels = log_ticks(self._low, self._high, most)
        elif panel.bytes:
            places, labels = byte_ticks(self._low, self._high, most)
        else:
            places, labels = number_ticks(
                self._low, self._high, most, whole=panel.whole, percent=panel.percent
            )  # fmt: skip
        heights = [self._y(place) for place in places]
        for height, label in zip(heights, labels, strict=True):
            surface.write(label, axes.left - gap, height, style, across="right")
        starts, ends = ([(x, height) for height in heights] for x in (axes.left, axes.right))
        surface.segments(starts, ends, colors.grid, width=0.8)

    def _write_title(self, panel: Panel) -> None:
        """The title at the left; at the right each line's word and latest value, in two rows if need be."""
        surface, inch = self._surface, self._surface.inch
        height, gap = self._axes.top + 0.16 * inch, 0.10 * inch
        edge = self._place.left + 0.06 * inch  # in line with the numbers, not with the axes
        title = surface.write(panel.title, edge, height, TextStyle(_TITLE, self._colors.ink, bold=True))
        legend = [(f"{line.word} {line.latest}".strip(), line.color) for line in panel.lines]
        lefts, right = (title.box.right + gap, edge), self._axes.right

        def rows(size: float) -> list[list[tuple[str, str]]]:
            words = [text for text, _ in legend]
            first = _that_fit([surface.measure(text, size) + gap for text in words], right - lefts[0] + gap)
            return [legend[:first], legend[first:]]

        size = next((size for size in (_LEGEND, _TICK) if not rows(size)[1]), _TICK)
        if rows(size)[1]:
            self._axes = replace(self._axes, top=self._axes.top - _LEGEND_ROW * inch)
        for row, left in zip(rows(size), lefts, strict=True):
            end = right
            for text, color in reversed(row):
                start = end - surface.measure(text, size)
                if start >= left:
                    surface.write(text, start, height, TextStyle(size, self._colors.hue(color)))
                end = start - gap
            height -= _LEGEND_ROW * inch

    def _write_empty(self, text: str) -> None:
        surface, axes = self._surface, self._axes
        lines, step = text.split("\n"), 1.5 * _LEGEND * surface.point
        x, y = (axes.left + axes.right) / 2, (axes.bottom + axes.top) / 2 + step * (len(lines) - 1) / 2
        style = TextStyle(_LEGEND, self._colors.faint_ink)
        for number, line in enumerate(lines):
            surface.write(line, x, y - number * step, style, across="center")

    def _write_marks(self, marks: Sequence[Mark]) -> None:
        """Write marks' words beside their lines; where they would overlap, the newest alone has them.

        Each has a row for good: nothing jumps as the axis grows.
        """
        surface, axes = self._surface, self._axes
        taken: dict[int, list[Box]] = {row: [] for row in range(_MARK_ROWS)}
        row, near = 10 * surface.point, 3 * surface.point
        for mark in reversed(marks):
            x, number = self._x(mark.event.time), mark.number % _MARK_ROWS
            # where newer words in this row leave room
            low = max([axes.left, *(box.right for box in taken[number] if box.left < x)])
            high = min([axes.right, *(box.left for box in taken[number] if box.right > x)])
            text = self._cut(mark.event.text, high - low)
            wide = surface.measure(text, _MARK)
            beside = (left for left in (x + near, x - near - wide) if low <= left <= high - wide)
            left = next(beside, high - wide)  # else across its line
            top = axes.top - 2 * surface.point - number * row
            if text:
                taken[number].append(Box(left - near, top - row + 1, left + wide + near, top))
                surface.rectangle(Box(left - 1, top - row + 1, left + wide + 1, top), self._colors.paper, alpha=0.75)
                surface.write(text, left, top - (row - 1) / 2, TextStyle(_MARK, self._colors.ink))

    def _cut(self, text: str, width: float) -> str:
        """As many whole words of a text as fit into so many pixels."""
        words = text.split()
        for number in range(len(words), 0, -1):
            shown = " ".join(words[:number]) + ("" if number == len(words) else " \N{HORIZONTAL ELLIPSIS}")
            if self._surface.measure(shown, _MARK) <= width:
                return shown
        return ""


def _steps(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each value holds until the next point."""
    return np.repeat(x, 2)[1:], np.repeat(y, 2)[:-1]


def _that_fit(widths: Sequence[float], room: float) -> int:
    """How many of them, from the first on, have room beside each other."""
    return int(np.searchsorted(np.cumsum(widths), room, side="right"))
