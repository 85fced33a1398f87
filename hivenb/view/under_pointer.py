"""What a picture of the charts shows at each place, for the layer that answers a pointer, and as words.

The layer is ``chart_pointer.js``; it is given these facts with each picture, and needs no kernel to tell a value.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hivenb.view import words
from hivenb.view.chart_choice import ChartChoice, key
from hivenb.view.charts import Picture
from hivenb.view.drawing_surface import Box
from hivenb.view.drawn_panel import DrawnPanel
from hivenb.view.panels import Line, Panel

#: Points of a line of which a pointer learns: about as many as it can tell apart.
_MOST_POINTS = 240


def facts(picture: Picture, choice: ChartChoice) -> dict[str, Any]:
    """All of a picture, as JSON has it: places as shares of its width and height, from the upper left corner.

    :param choice: as which it was drawn
    """
    return {
        "alt": in_words(picture, choice),
        "width": choice.width,
        "zoomed": choice.window is not None,
        "panels": [_panel(drawn, picture) for drawn in picture.panels],
    }


def in_words(picture: Picture, choice: ChartChoice) -> str:
    """What the picture shows, for those who do not see it: of each chart the latest values."""
    charts = []
    for panel in [drawn.panel for drawn in picture.panels]:
        shown = [f"{line.word} {line.latest}".strip() for line in panel.lines if not line.hidden]
        charts.append(f"{panel.title}: {', '.join(shown) or 'nothing yet'}.")
    part = ""
    if choice.window is not None:
        start, end = (words.duration(seconds) for seconds in choice.window)
        part = f", from {start} to {end}"
    return f"Charts of the run{part}. Latest values: {' '.join(charts)}"


def _panel(drawn: DrawnPanel, picture: Picture) -> dict[str, Any]:
    panel = drawn.panel
    return {
        "title": panel.title,
        "box": _shares(drawn.axes, picture),
        "axis": panel.axis,
        "across": list(drawn.across),
        "whole": list(drawn.whole),
        "up": list(drawn.up),
        "log": panel.log,
        "stacked": panel.stacked,
        "unit": _unit(panel),
        "lines": [_line(drawn, line, picture) for line in panel.lines],
        "marks": [
            {
                "box": _shares(box, picture),
                "events": [
                    {"number": one.number, "text": one.event.text, "at": float(one.place)} for one in mark.events
                ],
            }
            for mark, box in drawn.marks
        ],
    }


def _unit(panel: Panel) -> str:
    if panel.percent or panel.stacked:
        return "share"
    return "bytes" if panel.bytes else "whole" if panel.whole else "number"


def _line(drawn: DrawnPanel, line: Line, picture: Picture) -> dict[str, Any]:
    count = len(line.points.times)
    part = np.unique(np.linspace(0, count - 1, min(count, _MOST_POINTS)).astype(int)) if count else np.array([], int)
    box = drawn.legend.get(line.word) if line.word else None
    return {
        "key": key(drawn.panel, line),
        "word": line.word or drawn.panel.title,
        "color": line.color,
        "hidden": line.hidden,
        "step": line.step,
        "legend": None if box is None else _shares(box, picture),
        "x": _numbers(np.asarray(drawn.to_x(line.points.times), float)[part], 7),
        "y": _numbers(line.points.values[part], 5),
        "trend": None if line.trend is None else _numbers(line.trend[part], 5),
    }


def _numbers(values: np.ndarray, digits: int) -> list[float | None]:
    """In few digits; JSON has no numbers that are not finite."""
    known = np.isfinite(values)
    sizes = np.where(known & (values != 0), np.abs(values), 1.0)
    scales = 10.0 ** np.clip(digits - 1 - np.floor(np.log10(sizes)), -300, 300)
    rounded = np.where(known, np.round(np.where(known, values, 0.0) * scales) / scales, 0.0)
    return [number if is_known else None for number, is_known in zip(rounded.tolist(), known.tolist(), strict=True)]


def _shares(box: Box, picture: Picture) -> list[float]:
    """Left, top, right, bottom."""
    across, up = picture.width, picture.height
    edges = (box.left / across, 1 - box.top / up, box.right / across, 1 - box.bottom / up)
    return [round(float(edge), 4) for edge in edges]
