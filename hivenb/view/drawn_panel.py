"""Where in the picture things lie, for whoever points at it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hivenb.view.drawing_surface import Box
from hivenb.view.horizontal_axis import ToAxis
from hivenb.view.marks import Mark
from hivenb.view.panels import Panel


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
