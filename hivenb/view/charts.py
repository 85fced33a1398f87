"""The dashboard's picture: one snapshot in, one PNG out.

Drawn without pyplot, so that a background thread may draw while the user plots something else, and without a style of
the user's, which may change at any moment and may ask for TeX.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hivenb.figures.history import Snapshot
from hivenb.view import theme
from hivenb.view.chart_choice import ChartChoice, as_chosen
from hivenb.view.drawing_surface import Box, DrawingSurface
from hivenb.view.drawn_panel import DrawnPanel
from hivenb.view.horizontal_axis import to_axis
from hivenb.view.panel_drawing import PanelDrawing
from hivenb.view.panels import panels

WIDTH, HEIGHT, DPI = 7.4, 5.0, 150

_HEIGHTS = (0.40, 0.31, 0.29)  # of the rows, as shares of the picture
_WIDTHS = {1: (1.0,), 2: (0.57, 0.43), 3: (0.35, 0.35, 0.30)}  # of a row's panels, by their number


class ChartImage:
    """Turns snapshots into PNGs, on one surface that is used again and again. For one thread at a time.

    :param width: inches
    :param height: inches
    :param dpi: pixels an inch
    """

    def __init__(self, width: float = WIDTH, height: float = HEIGHT, dpi: int = DPI) -> None:
        self._surface = DrawingSurface(width, height, dpi)

    def png(self, snapshot: Snapshot, **look: Any) -> bytes:
        """The picture of a snapshot; equal snapshots give equal bytes.

        :param look: fields of :class:`hivenb.view.chart_choice.ChartChoice`
        """
        return self.drawn(snapshot, ChartChoice(**look))[0]

    def drawn(self, snapshot: Snapshot, choice: ChartChoice) -> tuple[bytes, Picture]:
        """The picture as PNG, and where in it things lie."""
        picture = draw(snapshot, self._surface, choice)
        return self._surface.png(), picture


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


def draw(snapshot: Snapshot, surface: DrawingSurface, choice: ChartChoice) -> Picture:
    """Draw a snapshot over whatever the surface showed before; :func:`hivenb.view.panels.panels` says what it shows.

    Through all panels goes a thin line wherever an event was marked, with a word in the panel that it belongs to.
    """
    colors = theme.DARK if choice.dark else theme.LIGHT
    surface.clear(colors.paper)
    now = last_moment(snapshot)
    starts = np.array([event.time for event in snapshot.events if event.kind == "run"])
    top, drawn = float(surface.height), []
    for row, share in zip(panels(snapshot, choice.axis, choice.log), _HEIGHTS, strict=True):
        bottom, left = top - share * surface.height, 0.0
        for panel, width in zip(row, _WIDTHS[len(row)], strict=True):
            right = left + width * surface.width
            place, to_x = Box(left, bottom, right, top), to_axis(snapshot, panel.axis)
            drawing = PanelDrawing(surface, colors, place, to_x, now, choice.window)
            drawn.append(drawing.draw(as_chosen(panel, choice, starts), snapshot.events))
            left = right
        top = bottom
    return Picture(surface.width, surface.height, tuple(drawn))


def last_moment(snapshot: Snapshot) -> float:
    """Seconds at which something was recorded last."""
    times = [float(series.times[-1]) for series in snapshot.series.values() if len(series)]
    return max([0.0, *times, *(event.time for event in snapshot.events)])
