"""The dashboard's picture: one snapshot in, one PNG out.

Drawn without pyplot, so that a background thread may draw while the user plots something else, and without a style of
the user's, which may change at any moment and may ask for TeX.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hivenb.figures.history import Snapshot
from hivenb.view import theme
from hivenb.view.chart_choice import ChartChoice, as_chosen
from hivenb.view.drawing_surface import Box, DrawingSurface
from hivenb.view.drawn_panel import DrawnPanel
from hivenb.view.horizontal_axis import to_axis
from hivenb.view.marks import Numbered
from hivenb.view.not_yet import ANY_TIME, Situation
from hivenb.view.panel_drawing import PanelDrawing
from hivenb.view.panels import Panel, panels

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
        :param look: fields of :class:`hivenb.view.chart_choice.ChartChoice`
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
    """Draw a snapshot over whatever the surface showed before; :func:`hivenb.view.panels.panels` says what it shows.

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
