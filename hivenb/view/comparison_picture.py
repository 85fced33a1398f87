"""The losses of a comparison as curves: those of training and those of validation, over time and over epochs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hivenb.figures.history import Snapshot
from hivenb.run.comparison import Comparison, Outcome, Unfinished
from hivenb.view import theme
from hivenb.view.chart_choice import ChartChoice, as_chosen
from hivenb.view.drawing_surface import Box, DrawingSurface, TextStyle
from hivenb.view.horizontal_axis import to_axis
from hivenb.view.panel_drawing import PanelDrawing
from hivenb.view.panels import Line, Panel, Points

#: Of the options in the order in which they were given, in the table and in the picture; every other line is dashed,
#: and hues that are near each other differ in that.
COLORS = (theme.BLUE, theme.VERMILLION, theme.GREEN, theme.PURPLE, theme.ORANGE, theme.GREY)

_WIDTH, _ROW, _DPI = 9.0, 2.5, 130  # inches, pixels an inch
_LEGEND_ROW, _SAMPLE_OF_LINE, _MARGIN = 0.26, 0.30, 0.14  # inches
_TEXT = 9.0  # points
_CHOICE = ChartChoice(smoothing="strong")  # several curves in one panel: nobody can tell zigzags apart
_TITLES = {"loss": "Training loss, smoothed", "val_loss": "Validation loss"}


def color_of(index: int) -> str:
    """The colour of the options with that place among all."""
    return COLORS[index % len(COLORS)]


def is_dashed(index: int) -> bool:
    """Whether their lines are dashed, so that neighbours differ without colours as well."""
    return index % 2 == 1


def picture(comparison: Comparison) -> bytes | None:
    """The picture as PNG; ``None`` while there is no loss."""
    entries = [(index, entry) for index, entry in enumerate(comparison.entries) if _has(entry.snapshot, "loss")]
    if not entries:
        return None
    shown = [name for name in _TITLES if any(_has(entry.snapshot, name) for _, entry in entries)]
    rows = _legend_rows(entries)
    top = len(rows) * _LEGEND_ROW + 0.06
    surface = DrawingSurface(_WIDTH, top + _ROW * len(shown), _DPI)
    surface.clear(theme.LIGHT.paper)
    _draw_legend(surface, rows)
    middle = surface.width / 2
    for row, name in enumerate(shown):
        high = surface.height - (top + _ROW * row) * surface.inch
        for column, axis in enumerate(("time", "epochs")):
            place = Box(column * middle, high - _ROW * surface.inch, (column + 1) * middle, high)
            panel = Panel(f"{_TITLES[name]}, over {axis}", _lines(entries, name, axis), axis=axis)
            end = max(float(line.points.times[-1]) for line in panel.lines)
            drawing = PanelDrawing(surface, theme.LIGHT, place, lambda places: places, end)
            drawing.draw(as_chosen(panel, _CHOICE, np.array([])), ())
    return surface.png()


def _lines(entries: Sequence[tuple[int, Outcome | Unfinished]], name: str, axis: str) -> tuple[Line, ...]:
    lines = []
    for index, entry in entries:
        snapshot = entry.snapshot
        if snapshot is not None and _has(snapshot, name):
            series = snapshot.series[name]
            places = np.asarray(to_axis(snapshot, axis)(series.times), float)
            points = Points.single(places, series.values)
            lines.append(Line(points, color_of(index), "", "", smooth=name == "loss", dashed=is_dashed(index)))
    return tuple(lines)


def _has(snapshot: Snapshot | None, name: str) -> bool:
    return snapshot is not None and name in snapshot.series and len(snapshot.series[name]) > 0


def _legend_rows(entries: Sequence[tuple[int, Outcome | Unfinished]]) -> list[list[tuple[int, str]]]:
    """Names beside each other, in as many rows as they need; a name that is wider than the picture is cut."""
    measure = DrawingSurface(1, 1, _DPI).measure
    rows: list[list[tuple[int, str]]] = [[]]
    room = most = (_WIDTH - 2 * _MARGIN) * _DPI
    for index, entry in entries:
        text = entry.name
        while text and measure(text, _TEXT) > most - 2 * _SAMPLE_OF_LINE * _DPI:
            text = text[:-2].rstrip("…") + "…"
        wide = measure(text, _TEXT) + 2 * _SAMPLE_OF_LINE * _DPI
        if wide > room and rows[-1]:
            rows.append([])
            room = most
        rows[-1].append((index, text))
        room -= wide
    return rows


def _draw_legend(surface: DrawingSurface, rows: Sequence[Sequence[tuple[int, str]]]) -> None:
    whole = Box(0, 0, surface.width, surface.height)
    for number, row in enumerate(rows):
        x, y = _MARGIN * surface.inch, surface.height - (number + 0.65) * _LEGEND_ROW * surface.inch
        for index, text in row:
            end = x + _SAMPLE_OF_LINE * surface.inch
            dashes = (4, 2) if is_dashed(index) else None
            surface.line([x, end], [y, y], color_of(index), width=2.2, within=whole, dashes=dashes)
            word = surface.write(text, end + 0.08 * surface.inch, y, TextStyle(_TEXT, theme.LIGHT.ink))
            x = word.box.right + (_SAMPLE_OF_LINE - 0.08) * surface.inch
