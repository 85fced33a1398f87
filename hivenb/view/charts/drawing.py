"""One panel of the charts: axes, lines, legend, and words at what happened."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path as FilePath
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.path import Path
from matplotlib.transforms import Bbox, IdentityTransform
from PIL import Image, ImageDraw, ImageFont

from hivenb.figures.history import Snapshot
from hivenb.view import theme
from hivenb.view.charts.panels import (
    ChartChoice,
    Line,
    Panel,
    ToAxis,
    as_chosen,
    limits,
    logarithm,
    panels,
    to_axis,
    with_gaps,
)
from hivenb.view.charts.ticks import byte_ticks, log_ticks, number_ticks, time_ticks
from hivenb.view.empty_states import ANY_TIME, Situation
from hivenb.view.marks import Mark, Numbered, laid_out

# -- drawing surface -------------------------------------------------------------------------------------------------
#
# What the charts are drawn on: lines and areas by Agg, words by Pillow.
#
# matplotlib's figures and axes take three to four times as long for the same panels, most of it for texts:
# ``tests/benchmarks/dashboard.py`` draws both. Nothing here knows pyplot or the user's style, so that a background
# thread may draw whatever the user does.


_NOTHING = IdentityTransform()


@dataclass(frozen=True)
class Box:
    """A part of the surface, in pixels from its lower left corner."""

    left: float
    bottom: float
    right: float
    top: float

    @property
    def width(self) -> float:
        return self.right - self.left

    @property
    def height(self) -> float:
        return self.top - self.bottom

    def overlaps(self, other: Box) -> bool:
        """Whether they have a point in common."""
        return (
            self.left < other.right
            and other.left < self.right
            and self.bottom < other.top
            and other.bottom < self.top
        )  # fmt: skip


@dataclass(frozen=True)
class TextStyle:
    """How a text looks.

    :param size: points
    """

    size: float
    color: str
    bold: bool = False


@dataclass(frozen=True)
class Word:
    """A text on the surface, and the room that it takes."""

    text: str
    box: Box
    style: TextStyle


class DrawingSurface:
    """A picture in pixels, ``y`` upwards, drawn anew for each frame. For one thread at a time.

    :param width: inches
    :param height: inches
    :param dpi: pixels an inch
    """

    def __init__(self, width: float, height: float, dpi: int) -> None:
        self.width, self.height = round(width * dpi), round(height * dpi)
        self.point = dpi / 72
        self.inch = dpi
        self.words: list[Word] = []
        self._renderer = RendererAgg(self.width, self.height, dpi)

    def clear(self, color: str) -> None:
        """An empty surface of that color."""
        self._renderer.clear()
        self.words = []
        self.rectangle(Box(0, 0, self.width, self.height), color)

    def rectangle(self, box: Box, color: str, alpha: float = 1.0) -> None:
        """A filled rectangle without an edge."""
        corners = [(box.left, box.bottom), (box.right, box.bottom), (box.right, box.top), (box.left, box.top)]
        self._fill(np.array(corners), color, alpha, None)

    def line(
        self, x: Any, y: Any, color: str, *, width: float = 1.0, alpha: float = 1.0, within: Box | None = None,
        dashes: tuple[float, ...] | None = None,
    ) -> None:  # fmt: skip
        """A line through these points, broken where a number is nan; widths and dashes in points."""
        vertices = np.column_stack([x, y])
        path = Path(vertices)
        path.should_simplify = len(vertices) > 128
        path.simplify_threshold = 1 / 4
        pen = self._pen(color, alpha, within)
        pen.set_linewidth(width)
        if dashes is not None:
            pen.set_dashes(0, dashes)
        self._renderer.draw_path(pen, path, _NOTHING)

    def segments(self, starts: Any, ends: Any, color: str, *, width: float = 1.0, alpha: float = 1.0) -> None:
        """Straight lines, each from a start to an end."""
        if len(starts) == 0:
            return
        vertices = np.stack([np.asarray(starts, float), np.asarray(ends, float)], axis=1).reshape(-1, 2)
        path = Path(vertices, np.tile([Path.MOVETO, Path.LINETO], len(starts)))
        pen = self._pen(color, alpha, None)
        pen.set_linewidth(width)
        pen.set_snap(True)
        self._renderer.draw_path(pen, path, _NOTHING)

    def area(self, x: Any, low: Any, high: Any, color: str, *, alpha: float, within: Box) -> None:
        """The area between two lines, broken where a number is nan."""
        x, low, high = np.broadcast_arrays(np.asarray(x, float), np.asarray(low, float), np.asarray(high, float))
        known = np.isfinite(x) & np.isfinite(low) & np.isfinite(high)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], known, [False]]).astype(int)))
        for start, end in edges.reshape(-1, 2):
            there = np.column_stack([x[start:end], high[start:end]])
            back = np.column_stack([x[start:end], low[start:end]])[::-1]
            self._fill(np.concatenate([there, back]), color, alpha, within)

    def dots(self, x: Any, y: Any, color: str, *, size: float) -> None:
        """Round dots, ``size`` points wide."""
        circle = Path.unit_circle()
        disc = np.asarray(circle.vertices) * (size * self.point / 2)
        pen = self._pen(color, 1.0, None)
        pen.set_linewidth(0)
        fill = mpl.colors.to_rgba(color)
        for here in np.column_stack([x, y]):
            if np.isfinite(here).all():
                self._renderer.draw_path(pen, Path(disc + here, circle.codes), _NOTHING, fill)

    def measure(self, text: str, size: float, bold: bool = False) -> float:
        """How wide a text would be, in pixels."""
        return _font(size * self.point, bold).getlength(text)

    def write(
        self, text: str, x: float, y: float, style: TextStyle, *, across: str = "left", up: str = "middle"
    ) -> Word:
        """A line of text.

        :param x: of its left end, centre or right end, as ``across`` says
        :param y: of its bottom, middle or top, as ``up`` says
        """
        wide, high = self.measure(text, style.size, style.bold), 1.2 * style.size * self.point
        left = x - {"left": 0.0, "center": 0.5, "right": 1.0}[across] * wide
        bottom = y - {"bottom": 0.0, "middle": 0.5, "top": 1.0}[up] * high
        word = Word(text, Box(left, bottom, left + wide, bottom + high), style)
        self.words.append(word)
        return word

    def png(self) -> bytes:
        """The surface as it is, all words on top."""
        image = Image.frombuffer("RGBA", (self.width, self.height), self._renderer.buffer_rgba(), "raw", "RGBA", 0, 1)
        image = image.convert("RGB")
        draw = ImageDraw.Draw(image)
        for word in self.words:
            middle = self.height - (word.box.bottom + word.box.top) / 2
            font = _font(word.style.size * self.point, word.style.bold)
            draw.text((word.box.left, middle), word.text, fill=word.style.color, font=font, anchor="lm")
        file = io.BytesIO()
        image.save(file, "PNG", compress_level=1)
        return file.getvalue()

    def _fill(self, vertices: np.ndarray, color: str, alpha: float, within: Box | None) -> None:
        pen = self._pen(color, alpha, within)
        pen.set_linewidth(0)
        self._renderer.draw_path(pen, Path(vertices), _NOTHING, (*mpl.colors.to_rgb(color), alpha))

    def _pen(self, color: str, alpha: float, within: Box | None) -> Any:
        pen = self._renderer.new_gc()
        pen.set_foreground(color)
        pen.set_alpha(alpha)
        pen.set_joinstyle("round")
        pen.set_capstyle("butt")
        if within is not None:
            pen.set_clip_rectangle(Bbox.from_extents(within.left, within.bottom, within.right, within.top))
        return pen


@cache
def _font(pixels: float, bold: bool) -> ImageFont.FreeTypeFont:
    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"  # comes with matplotlib, so it is there
    path = FilePath(mpl.get_data_path()) / "fonts" / "ttf" / name
    return ImageFont.truetype(str(path), pixels, layout_engine=ImageFont.Layout.BASIC)


# -- drawn panel -----------------------------------------------------------------------------------------------------
#
# Where in the picture things lie, for whoever points at it.


@dataclass(frozen=True, eq=False)
class DrawnPanel:
    """A panel as it was drawn.

    :param panel: its lines as they are seen
    :param axes: the rectangle between its axes, in pixels
    :param to_x: from seconds to places on the horizontal axis
    :param across: the first and the last place on it
    :param whole: what they are if nothing is cut off
    :param up: the lowest and the highest value of the vertical axis; of a logarithmic one, as logarithms
    :param legend: of each line's word, where it is written
    :param marks: those that belong to it, and where the number of each is written, with its words if they are
    """

    panel: Panel
    axes: Box
    to_x: ToAxis
    across: tuple[float, float]
    whole: tuple[float, float]
    up: tuple[float, float]
    legend: Mapping[str, Box]
    marks: tuple[tuple[Mark, Box], ...]


# -- panel drawing ---------------------------------------------------------------------------------------------------


_LEFT, _RIGHT, _TOP, _BOTTOM = 0.62, 0.14, 0.34, 0.26  # inches of margin around the axes of a panel
_SHORTEST = 10.0  # seconds of time axis before anything has happened
_MOST_MARKS = 100
_LEGEND_ROW = 0.18  # inches
_MARK_ROW = 0.17  # inches
_HOLDS = 3.0  # seconds for which the last value of a step counts on, at most
#: Points, of which the page has 0.75 for each of its pixels: the page's text is of 13 and of 12 pixels.
_TITLE, _LEGEND, _TICK, _MARK = 9.75, 9.75, 9.0, 9.0


class PanelDrawing:
    """One panel in its place on a surface.

    :param place: where on the surface
    :param to_x: from seconds to places on the panel's horizontal axis
    :param now: seconds at which the axis ends, at least
    :param window: seconds from and to which is drawn, instead of all until now
    """

    def __init__(
        self, surface: DrawingSurface, colors: theme.Theme, place: Box, to_x: ToAxis, now: float,
        window: tuple[float, float] | None = None,
    ) -> None:  # fmt: skip
        self._surface, self._colors, self._to_x, self._now, self._window = surface, colors, to_x, now, window
        inch = surface.inch
        self._place = place
        self._axes = Box(
            place.left + _LEFT * inch, place.bottom + _BOTTOM * inch, place.right - _RIGHT * inch,
            place.top - _TOP * inch,
        )  # fmt: skip
        self._low, self._high = 0.0, 1.0
        self._start, self._end = self._whole = 0.0, 1.0

    def draw(self, panel: Panel, events: Sequence[Numbered]) -> DrawnPanel:
        """Draw it, with a thin line at each event, and the numbers and words of those that belong to it.

        :param events: oldest first, each at its time
        :returns: where things lie now
        """
        legend = self._write_title(panel)
        axes = self._axes
        floor = (axes.left, axes.bottom), (axes.right, axes.bottom)
        marks: list[Mark] = []
        row = 0.0
        if panel.lines:
            self._set_limits(panel)
            events = [replace(one, place=float(self._to_x(np.array([one.event.time]))[0])) for one in events]
            events = [one for one in events if self._start <= one.place <= self._end]
            own = [one for one in events if one.event.kind in panel.marks][-_MOST_MARKS:]
            if own:
                row = min(_MARK_ROW * self._surface.inch, 0.5 * axes.height)
                self._high += row / (axes.height - row) * (self._high - self._low)  # room for them
            self._draw_ticks(panel)
            self._draw_lines(panel, [one.place for one in events if one.event.kind == "run"])
            self._draw_events(events, panel.marks)
            marks = self._write_marks(own, row)
        if all(line.hidden for line in panel.lines):
            self._write_empty("all is off: click a name" if panel.lines else panel.empty)
        self._surface.segments([floor[0]], [floor[1]], self._colors.frame, width=0.8)
        return DrawnPanel(
            panel=panel,
            axes=axes,
            to_x=self._to_x,
            across=(self._start, self._end),
            whole=self._whole,
            up=(self._low, self._high),
            legend=legend,
            marks=tuple((mark, Box(mark.box[0], axes.top - row, mark.box[1], axes.top)) for mark in marks),
        )

    def _set_limits(self, panel: Panel) -> None:
        first, last = (float(x) for x in self._to_x(np.array([0.0, self._now])))
        shortest = _SHORTEST if panel.axis == "time" else 1.0
        self._start, self._end = self._whole = first, first + max(last - first, shortest) * 1.02
        if self._window is not None:
            start, end = (float(x) for x in self._to_x(np.array(self._window)))
            self._start, self._end = start, max(end, start + 1e-6 * shortest)
        self._low, self._high = limits(panel)

    def _draw_lines(self, panel: Panel, starts: Sequence[float]) -> None:
        shown = [line for line in panel.lines if not line.hidden and len(line.points.times)]
        if panel.stacked:
            self._draw_shares(shown)
        else:
            for line in shown:
                self._draw_line(line, panel.log, np.array(starts))

    def _draw_events(self, events: Sequence[Numbered], own: Sequence[str]) -> None:
        """A line for each; those of other panels are fainter."""
        axes = self._axes
        for one in events[-_MOST_MARKS:]:
            strength = 0.75 if one.event.kind in own else 0.3
            x = self._x(one.place)
            color = self._colors.hue(theme.EVENTS[one.event.kind])
            self._surface.segments([(x, axes.bottom)], [(x, axes.top)], color, width=0.8, alpha=strength)

    def _x(self, place: Any) -> Any:
        share = np.clip((place - self._start) / (self._end - self._start), -100, 100)
        return self._axes.left + share * self._axes.width

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
        if line.trend is not None:
            x, y = with_gaps(places, values, starts)
            surface.line(self._x(x), self._y(scaled(y)), color, width=0.7, alpha=0.30, within=within)
            values = line.trend
        x, y = with_gaps(places, values, starts)
        x, y = self._x(x), self._y(scaled(y))
        surface.line(x, y, color, width=1.6, within=within, dashes=(4, 2) if line.dashed else None)
        is_inside, known = (x >= within.left) & (x <= within.right), np.isfinite(y)
        if len(values) <= 40 and not line.smooth:
            surface.dots(x[known & is_inside], y[known & is_inside], color, size=3.0)
        newest = [place for place in np.flatnonzero(known)[-1:] if is_inside[place]]
        surface.dots(x[newest], y[newest], color, size=4.0)

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
        for fewer in range(most, 0, -1):
            places, labels = self._across_ticks(panel, fewer)
            wide = max((surface.measure(label, _TICK) for label in labels), default=0.0)
            if len(places) < 2 or self._x(places[1]) - self._x(places[0]) >= wide + gap:
                break
        for place, label in zip(places, labels, strict=True):
            half = surface.measure(label, _TICK) / 2
            x = self._x(place)
            if self._window is None or x - half >= self._place.left:
                x = min(x, self._place.right - half)  # the last one stays in the picture
                surface.write(label, x, axes.bottom - 1.3 * gap, style, across="center", up="top")
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

    def _across_ticks(self, panel: Panel, most: int) -> tuple[list[float], list[str]]:
        if panel.axis == "time":
            return time_ticks(self._end, most, self._start)
        places, labels = number_ticks(self._start, self._end, most, whole=True)
        labels[:1] = [f"{panel.axis.removesuffix('s')} {label}" for label in labels[:1]]
        return places, labels

    def _write_title(self, panel: Panel) -> dict[str, Box]:
        """The title at the left; at the right each line's word and latest value, in as many rows as they need."""
        surface, inch = self._surface, self._surface.inch
        height, gap = self._axes.top + 0.16 * inch, 0.10 * inch
        edge = self._place.left + 0.06 * inch  # in line with the numbers, not with the axes
        title = surface.write(panel.title, edge, height, TextStyle(_TITLE, self._colors.ink, bold=True))
        legend = [(line, line.word if line.hidden else f"{line.word} {line.latest}".strip()) for line in panel.lines]
        beside, right = title.box.right + gap, self._axes.right

        def rows(size: float) -> list[list[tuple[Line, str]]]:
            found, rest, left = [], legend, beside
            while rest:
                fit = _that_fit([surface.measure(text, size) + gap for _, text in rest], right - left + gap)
                fit = fit if fit or left == beside else 1  # a word that is wider than the panel stands alone
                found.append(rest[:fit])
                rest, left = rest[fit:], edge
            return found

        size = _LEGEND if len(rows(_LEGEND)) <= len(rows(_TICK)) else _TICK
        found = rows(size)
        self._axes = replace(self._axes, top=self._axes.top - max(0, len(found) - 1) * _LEGEND_ROW * inch)
        boxes = {}
        for row in found:
            end = right
            for line, text in reversed(row):
                start = end - surface.measure(text, size)
                boxes[line.word] = self._write_legend(line, text, (start, height), size)
                end = start - gap
            height -= _LEGEND_ROW * inch
        return boxes

    def _write_legend(self, line: Line, text: str, start: tuple[float, float], size: float) -> Box:
        """One that is switched off is struck through."""
        color = self._colors.faint_ink if line.hidden else self._colors.word(line.color)
        box = self._surface.write(text, *start, TextStyle(size, color)).box
        if line.hidden:
            self._surface.segments([(box.left, start[1])], [(box.right, start[1])], color, width=1.0)
        return box

    def _write_empty(self, text: str) -> None:
        surface, axes = self._surface, self._axes
        room = self._place.width - 0.2 * surface.inch
        lines = [part for line in text.split("\n") for part in self._folded(line, room)]
        step = 1.5 * _LEGEND * surface.point
        half = max(surface.measure(line, _LEGEND) for line in lines) / 2
        x = max((axes.left + axes.right) / 2, self._place.left + half)
        x = min(x, self._place.right - half)
        y = (axes.bottom + axes.top) / 2 + step * (len(lines) - 1) / 2
        style = TextStyle(_LEGEND, self._colors.faint_ink)
        for number, line in enumerate(lines):
            surface.write(line, x, y - number * step, style, across="center")

    def _folded(self, text: str, room: float) -> list[str]:
        """A text in lines that have room in so many pixels."""
        lines: list[str] = []
        for word in text.split():
            longer = f"{lines[-1]} {word}" if lines else word
            if lines and self._surface.measure(longer, _LEGEND) <= room:
                lines[-1] = longer
            else:
                lines.append(word)
        return lines

    def _write_marks(self, events: Sequence[Numbered], row: float) -> list[Mark]:
        """Write the number of each beside its line, and its words where all of them have room."""
        surface, axes, colors = self._surface, self._axes, self._colors
        marks = laid_out(
            events, self._x, (axes.left, axes.right), lambda text: surface.measure(text, _MARK), surface.point
        )
        for mark in marks:
            left, right = mark.box
            surface.rectangle(Box(left - 1, axes.top - row, right + 1, axes.top), colors.paper, alpha=0.8)
            height = axes.top - row / 2
            color = colors.word(theme.EVENTS[mark.events[-1].event.kind])
            surface.write(mark.label, mark.left, height, TextStyle(_MARK, color))
            if mark.words:
                surface.write(mark.words, mark.words_left, height, TextStyle(_MARK, colors.ink))
        return marks


def _steps(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each value holds until the next point."""
    return np.repeat(x, 2)[1:], np.repeat(y, 2)[:-1]


def _that_fit(widths: Sequence[float], room: float) -> int:
    """How many of them, from the first on, have room beside each other."""
    return int(np.searchsorted(np.cumsum(widths), room, side="right"))


# -- charts ----------------------------------------------------------------------------------------------------------
#
# The dashboard's picture: one snapshot in, one PNG out.
#
# Drawn without pyplot, so that a background thread may draw while the user plots something else, and without a style
# of the user's, which may change at any moment and may ask for TeX.


#: Pixels of the picture for an inch, of which the page has 96.
DPI = 150

#: Inches of the rows, and the shares of a row's panels, by their number.
_ROWS, _WIDTHS = (1.95, 1.52, 1.45), {1: (1.0,), 2: (0.57, 0.43), 3: (0.35, 0.35, 0.30)}

#: Pixels of the page below which a row has two panels at most, and the inches of such rows.
_NARROW, _NARROW_ROWS = 560, (1.8, 1.6, 1.6, 1.6)


class ChartImage:
    """Turns snapshots into PNGs, on a surface that is used again and again. For one thread at a time.

    :param dpi: pixels of the picture for an inch, of which the page has 96
    """

    def __init__(self, dpi: int = DPI) -> None:
        self._dpi = dpi
        self._surfaces: dict[int, DrawingSurface] = {}

    def png(self, snapshot: Snapshot, now: Situation = ANY_TIME, **look: Any) -> bytes:
        """The picture of a snapshot; equal snapshots give equal bytes.

        :param now: where the run stands
        :param look: fields of :class:`hivenb.view.charts.panels.ChartChoice`
        """
        return self.drawn(snapshot, ChartChoice(**look), now)[0]

    def drawn(self, snapshot: Snapshot, choice: ChartChoice, now: Situation = ANY_TIME) -> tuple[bytes, Picture]:
        """The picture as PNG, and where in it things lie."""
        surface = self._surfaces.get(choice.width)
        if surface is None:
            self._surfaces = {choice.width: (surface := surface_for(choice.width, self._dpi))}
        picture = draw(snapshot, surface, choice, now)
        return surface.png(), picture


def surface_for(width: int, dpi: int = DPI) -> DrawingSurface:
    """What a picture of so many pixels of the page is drawn on.

    :param dpi: pixels of the picture for an inch, of which the page has 96
    """
    return DrawingSurface(width / 96, sum(_NARROW_ROWS if width < _NARROW else _ROWS), dpi)


@dataclass(frozen=True, eq=False)
class Picture:
    """Where things lie in a picture.

    :param width: pixels
    :param height: pixels
    :param panels: from left to right, from top to bottom
    """

    width: int
    height: int
    panels: tuple[DrawnPanel, ...]


def draw(snapshot: Snapshot, surface: DrawingSurface, choice: ChartChoice, now: Situation = ANY_TIME) -> Picture:
    """Draw a snapshot over whatever the surface showed before.

    What it shows, :func:`hivenb.view.charts.panels.panels` says.

    Through all panels goes a thin line wherever an event was marked, with its number in the panel that it belongs to.
    """
    colors = theme.DARK if choice.dark else theme.LIGHT
    surface.clear(colors.paper)
    end = last_moment(snapshot)
    starts = np.array([event.time for event in snapshot.events if event.kind == "run"])
    events = numbered(snapshot)
    top, drawn = float(surface.height), []
    for row, height in _rows(panels(snapshot, choice.axis, choice.log, now), choice.width):
        bottom, left = top - height * surface.inch, 0.0
        widths = _WIDTHS[len(row)] if choice.width >= _NARROW else [1 / len(row)] * len(row)
        for panel, width in zip(row, widths, strict=True):
            right = left + width * surface.width
            place, to_x = Box(left, bottom, right, top), to_axis(snapshot, panel.axis)
            drawing = PanelDrawing(surface, colors, place, to_x, end, choice.window)
            drawn.append(drawing.draw(as_chosen(panel, choice, starts), events))
            left = right
        top = bottom
    return Picture(surface.width, surface.height, tuple(drawn))


def _rows(found: Sequence[Sequence[Panel]], width: int) -> list[tuple[Sequence[Panel], float]]:
    """Panels row by row, each with its height in inches."""
    if width >= _NARROW:
        return list(zip(found, _ROWS, strict=True))
    first, *others = [panel for row in found for panel in row]
    rows = [[first], *(others[place : place + 2] for place in range(0, len(others), 2))]
    return list(zip(rows, _NARROW_ROWS, strict=True))


def numbered(snapshot: Snapshot) -> list[Numbered]:
    """All events with their numbers, oldest first."""
    events = sorted(snapshot.events, key=lambda event: event.time)
    return [Numbered(number, event, event.time) for number, event in enumerate(events, 1)]


def last_moment(snapshot: Snapshot) -> float:
    """Seconds at which something was recorded last."""
    times = [float(series.times[-1]) for series in snapshot.series.values() if len(series)]
    return max([0.0, *times, *(event.time for event in snapshot.events)])
