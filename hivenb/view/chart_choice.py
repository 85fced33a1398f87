"""What a person has chosen about the charts, and what becomes of a panel by it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hivenb.view.panels import SMOOTHING, Line, Panel, smoothed

#: Pixels of the page that a picture takes where no page has told how much room there is, and the least and most.
WIDTH, NARROWEST, WIDEST = 650, 360, 900


@dataclass(frozen=True)
class ChartChoice:
    """How charts are to be drawn.

    :param axis: what loss and metric are drawn against, one of :data:`hivenb.view.horizontal_axis.AXES`
    :param log: a logarithmic scale for the loss
    :param dark: light ink on dark paper
    :param smoothing: one of :data:`hivenb.view.panels.SMOOTHING`
    :param hidden: series that are switched off, as :func:`key` names them
    :param window: seconds from and to which is drawn; ``None`` for all of the run
    :param width: pixels of the page, from :data:`NARROWEST` to :data:`WIDEST`, that the picture has there
    """

    axis: str = "time"
    log: bool = False
    dark: bool = False
    smoothing: str = "some"
    hidden: frozenset[str] = frozenset()
    window: tuple[float, float] | None = None
    width: int = WIDTH


def key(panel: Panel, line: Line) -> str:
    """The name of a series among all of the picture; the same for all pictures."""
    return f"{panel.title}/{line.word}"


def as_chosen(panel: Panel, choice: ChartChoice, starts: np.ndarray) -> Panel:
    """The panel with its lines switched off, smoothed, and cut to the window as they were chosen to be.

    :param starts: when the run was started, in seconds: nothing is smoothed across
    """
    lines = []
    for line in panel.lines:
        values, strength = line.points.values, SMOOTHING[choice.smoothing]
        trend = None
        # few values are what they are, unless a person asks for more
        if line.smooth and strength and (len(values) >= 40 or strength > 1):
            # of all of it: it stays the same when one zooms in
            trend = smoothed(values, np.searchsorted(line.points.times, starts), strength)
        part = _inside(line.points.times, choice.window)
        lines.append(
            replace(
                line,
                points=line.points[part],
                trend=None if trend is None else trend[part],
                hidden=key(panel, line) in choice.hidden,
            )
        )
    return replace(panel, lines=tuple(lines))


def _inside(times: np.ndarray, window: tuple[float, float] | None) -> slice:
    """Which points lie in the window, and one more at each side: lines go on to the edge."""
    if window is None:
        return slice(None)
    first, last = window
    return slice(max(0, int(np.searchsorted(times, first)) - 1), int(np.searchsorted(times, last, side="right")) + 1)
