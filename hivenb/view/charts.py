"""The dashboard's picture: one snapshot in, one PNG out.

Drawn by a private figure with the Agg canvas, never by pyplot, so that a background thread may draw while the
user plots something else. Every text and colour is set here and none is taken from the user's matplotlib
style, which may change at any moment and may ask for TeX.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hivenb.history import Event, Snapshot
from hivenb.view import theme
from hivenb.view.panels import Line, Panel, limits, merged, panels, smoothed, with_gaps
from hivenb.view.ticks import number_ticks, time_ticks

WIDTH, HEIGHT, DPI = 7.4, 5.0, 150

_LEFT, _RIGHT, _TOP, _BOTTOM = 0.56, 0.14, 0.36, 0.30  # inches of margin around the axes of a panel
_SHORTEST = 10.0  # seconds of time axis before anything has happened


@dataclass(frozen=True)
class _Place:
    """A panel's share of the figure, margins included."""

    left: float
    bottom: float
    width: float
    height: float


_PLACES = (
    _Place(0, 0.44, 0.57, 0.56),
    _Place(0.57, 0.44, 0.43, 0.56),
    _Place(0, 0, 0.57, 0.44),
    _Place(0.57, 0, 0.43, 0.44),
)
_MOST_MARKS, _MARK_ROWS, _MARK_LETTERS = 40, 3, 32
_TEXT: dict[str, Any] = {"family": "DejaVu Sans", "usetex": False, "parse_math": False}


class ChartImage:
    """Turns snapshots into PNGs, on one figure that is used again and again. For one thread at a time.

    :param width: inches
    :param height: inches
    :param dpi: pixels an inch
    """

    def __init__(self, width: float = WIDTH, height: float = HEIGHT, dpi: int = DPI) -> None:
        self._figure = Figure(figsize=(width, height), dpi=dpi)
        self._canvas = FigureCanvasAgg(self._figure)

    def png(self, snapshot: Snapshot) -> bytes:
        """The picture of a snapshot; equal snapshots give equal bytes."""
        draw(snapshot, self._figure)
        buffer = io.BytesIO()
        self._canvas.print_png(buffer, metadata={"Software": None}, pil_kwargs={"compress_level": 4})
        return buffer.getvalue()


def draw(snapshot: Snapshot, figure: Figure) -> None:
    """Draw a snapshot over whatever the figure showed before.

    Loss (training and validation), a validation metric where there is one, peers, and samples per second, all
    over the same stretch of time, with a thin line and a word wherever an event was marked.

    :param snapshot: what to draw
    :param figure: one with an Agg canvas
    """
    times = [float(s.times[-1]) for s in snapshot.series.values() if len(s)]
    now = max([0.0, *times, *(event.time for event in snapshot.events)])
    top, low = panels(snapshot)
    for axes, place, panel in zip(_four_axes(figure), _PLACES, (*top, *low), strict=True):
        axes.set_visible(panel is not None)
        if panel is not None:
            # Without a neighbour the loss has the row to itself.
            share = 1.0 if panel is top[0] and top[1] is None else place.width
            _put(axes, place.left, place.bottom, share, place.height)
            _draw_panel(axes, panel, now, snapshot.events)


def _four_axes(figure: Figure) -> list[Axes]:
    """The figure's axes, empty. Made once: to make or clear one costs more than all that is drawn on it."""
    if len(figure.axes) != len(_PLACES):
        figure.clear()
        figure.set_layout_engine("none")
        figure.set_facecolor(theme.PAPER)
        for place in _PLACES:
            axes = figure.add_axes((place.left, place.bottom, place.width, place.height))
            axes.set_facecolor("none")
            axes.set_autoscale_on(False)
            axes.xaxis.set_visible(False)
            axes.yaxis.set_visible(False)
            for side, spine in axes.spines.items():
                spine.set_visible(side == "bottom")
                spine.set(color=theme.FRAME, linewidth=0.8)
    for axes in figure.axes:
        for artist in (*axes.lines, *axes.collections, *axes.texts):
            artist.remove()
    return figure.axes


def _put(axes: Axes, left: float, bottom: float, width: float, height: float) -> None:
    """Place the axes so that they and their margins fill this share of the figure."""
    wide, high = _inches(axes.figure)
    axes.set_position(
        (
            left + _LEFT / wide,
            bottom + _BOTTOM / high,
            width - (_LEFT + _RIGHT) / wide,
            height - (_TOP + _BOTTOM) / high,
        )
    )


def _inches(thing: Any) -> tuple[float, float]:
    if isinstance(thing, Figure):
        return tuple(thing.get_size_inches())
    extent = thing.get_window_extent()
    dpi = thing.figure.dpi
    return extent.width / dpi, extent.height / dpi


def _draw_panel(axes: Axes, panel: Panel, now: float, events: Sequence[Event]) -> None:
    axes.set_xlim(0.0, max(now, _SHORTEST) * 1.02)
    _write_title(axes, panel)
    if not panel.lines:
        style = {"fontsize": 8.5, "color": theme.FAINT_INK, "linespacing": 1.5, **_TEXT}
        axes.text(0.5, 0.5, panel.empty, transform=axes.transAxes, ha="center", va="center", **style)
        return
    low, high = limits(panel)
    near = 0.01 * axes.get_xlim()[1]
    marks = merged([event for event in events if event.kind in panel.marks], near)[-_MOST_MARKS:]
    if marks:
        high += 0.14 * (high - low)  # room for the words
    axes.set_ylim(low, high)
    _draw_ticks(axes, panel)
    starts = np.array([event.time for event in events if event.kind == "run"])
    for line in panel.lines:
        _draw_line(axes, line, now, starts)
    for event in events[-_MOST_MARKS:]:
        strength = 0.75 if event.kind in panel.marks else 0.3
        axes.axvline(event.time, color=theme.EVENTS[event.kind], linewidth=0.8, alpha=strength, zorder=1.5)
    _write_marks(axes, marks)


def _draw_line(axes: Axes, line: Line, now: float, starts: np.ndarray) -> None:
    series, color = line.series, line.color
    times, values = series.times, series.values
    if line.step:
        times, values = with_gaps(np.append(times, max(now, times[-1])), np.append(values, values[-1]), starts)
        axes.plot(times, values, color=color, linewidth=1.6, drawstyle="steps-post", zorder=3)
        axes.fill_between(times, values, step="post", color=color, alpha=0.10, linewidth=0, zorder=2)
        return
    if np.any(series.highs > series.lows):
        band = (*with_gaps(times, series.lows, starts), with_gaps(times, series.highs, starts)[1])
        axes.fill_between(*band, color=color, alpha=0.16, linewidth=0, zorder=2)
    if line.smooth and len(values) >= 40:
        axes.plot(*with_gaps(times, values, starts), color=color, linewidth=0.7, alpha=0.30, zorder=2.5)
        values = smoothed(values)
    marker: dict[str, Any] = {"marker": "o", "markersize": 3.0} if len(values) <= 40 else {}
    axes.plot(
        *with_gaps(times, values, starts), color=color, linewidth=1.6, zorder=3, solid_joinstyle="round",
        **({} if line.smooth else marker),
    )  # fmt: skip
    known = np.flatnonzero(np.isfinite(values))
    if len(known):
        at = known[-1]
        axes.plot(times[at], values[at], "o", color=color, markersize=4.0, zorder=4, clip_on=False)


def _draw_ticks(axes: Axes, panel: Panel) -> None:
    """Grid lines and numbers, as plain texts: matplotlib's own ticks take longer than all the rest."""
    wide, high = _inches(axes)
    style = {"fontsize": 7.5, "color": theme.FAINT_INK, "textcoords": "offset points", **_TEXT}
    for place, label in zip(*time_ticks(axes.get_xlim()[1], max(2, int(wide / 0.55))), strict=True):
        at: dict[str, Any] = {"xycoords": axes.get_xaxis_transform(), "ha": "center", "va": "top"}
        axes.annotate(label, (place, 0), (0, -5), **at, **style)
    bottom, top = axes.get_ylim()
    most = max(2, int(high / 0.34))
    places, labels = number_ticks(bottom, top, most, whole=panel.whole, percent=panel.percent)
    for place, label in zip(places, labels, strict=True):
        at = {"xycoords": axes.get_yaxis_transform(), "ha": "right", "va": "center"}
        axes.annotate(label, (0, place), (-5, 0), **at, **style)
    axes.hlines(places, 0, 1, transform=axes.get_yaxis_transform(), color=theme.GRID, linewidth=0.8, zorder=0.5)


def _write_title(axes: Axes, panel: Panel) -> None:
    """The title at the left; at the right each line's word and latest value, as far as there is room."""
    wide, high = _inches(axes)
    above = 1 + 0.12 / high
    at = {"transform": axes.transAxes, "va": "baseline", **_TEXT}
    edge = -(_LEFT - 0.06) / wide  # in line with the numbers, not with the axes
    title = axes.text(edge, above, panel.title, fontsize=9.5, fontweight="bold", color=theme.INK, ha="left", **at)
    into_axes = axes.transAxes.inverted()
    gap = 0.12 / wide
    left, right = title.get_window_extent().transformed(into_axes).x1 + gap, 1.0
    for line in reversed(panel.lines):
        for word in (f"{line.word} {line.latest}".strip(), line.latest):
            text = axes.text(right, above, word, fontsize=8.5, color=line.color, ha="right", **at)
            start = text.get_window_extent().transformed(into_axes).x0
            if start >= left:
                right = start - gap
                break
            text.remove()


def _write_marks(axes: Axes, events: Sequence[Event]) -> None:
    """Write events' words beside their lines, the newest first; one that finds no free place goes without."""
    frame = axes.get_window_extent()
    taken: list[Any] = []
    for event in reversed(events):
        word = event.text if len(event.text) <= _MARK_LETTERS else event.text[: _MARK_LETTERS - 1] + "…"
        text = axes.annotate(
            word, (event.time, 1.0), xycoords=axes.get_xaxis_transform(), xytext=(3, -2),
            textcoords="offset points", ha="left", va="top", fontsize=7, color=theme.INK, zorder=5,
            bbox={"facecolor": theme.PAPER, "edgecolor": "none", "alpha": 0.75, "pad": 1.0}, **_TEXT,
        )  # fmt: skip
        if text.get_window_extent().x1 > frame.x1:
            text.set_horizontalalignment("right")
            text.set_position((-3, -2))
        for row in range(_MARK_ROWS):
            text.set_position((text.get_position()[0], -2 - 10 * row))
            box = text.get_window_extent().padded(3)
            if box.x0 >= frame.x0 - 3 and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
        else:
            text.remove()
