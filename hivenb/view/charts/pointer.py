"""The layer over the charts that answers a pointer: a small script in the page, and what it has to say.

The picture stays the one that is saved, printed and tested. The script travels inside of an ``HTML`` widget and speaks
by way of a ``Text`` widget that is not seen: both are ipywidgets' own, which every front end has, without a network,
whether it runs in the kernel's environment or not. A widget class of our own, by anywidget say, would need its package
where the front end runs, and in Colab a content delivery network and the user's consent. Where a page runs no scripts,
the picture is there all the same.
"""

from __future__ import annotations

import base64
import json
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from hivenb.figures.history import Snapshot
from hivenb.view import formats
from hivenb.view.charts.drawing import Box, DrawnPanel, Picture
from hivenb.view.charts.panels import NARROWEST, WIDEST, ChartChoice, Line, Panel, key, to_time
from hivenb.view.notebook_output import require_ipywidgets
from hivenb.view.style import safe

#: Seconds of a window at least: more closely, there is nothing between two points.
_NARROWEST = 2.0


class ChartPointer:
    """The widgets beside the picture; all of them are unseen.

    :param asked: called when a pointer has asked for something, on whichever thread ipywidgets likes
    """

    def __init__(self, asked: Callable[[], None]) -> None:
        widgets = require_ipywidgets()
        self._asked = asked
        self._messages: deque[dict[str, Any]] = deque()
        self._facts = widgets.HTML()
        self._gate = widgets.Text()
        self._gate.observe(self._hear, names="value")
        self._script = widgets.HTML(script())
        self.widgets = (self._script, self._facts, self._gate)
        for widget in self.widgets:
            widget.add_class("hivenb-unseen")
        self._gate.add_class("hivenb-gate")

    def tell(self, facts: dict[str, Any]) -> None:
        """Give the page what the next picture shows; see :mod:`hivenb.view.charts.pointer`."""
        written = json.dumps(facts, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        self._facts.value = f'<div class="hivenb-under-pointer">{safe(written)}</div>'

    def apply(self, choice: ChartChoice, snapshot: Snapshot) -> ChartChoice:
        """The choice, changed as was asked for since the last call.

        :param snapshot: of the run's history
        """
        while self._messages:
            choice = changed(choice, self._messages.popleft(), snapshot)
        return choice

    def _hear(self, change: Any) -> None:
        if change["new"]:
            self._messages.append(json.loads(change["new"]))
            self._asked()


def changed(choice: ChartChoice, message: dict[str, Any], snapshot: Snapshot) -> ChartChoice:
    """What becomes of a choice by a message of the page.

    :param message: ``toggle`` with the name of a series, ``zoom`` with an axis and two places on it or with nothing, or
        ``width`` with the pixels of the page that there are
    :param snapshot: of the run's history
    """
    if "width" in message:
        return replace(choice, width=max(NARROWEST, min(int(message["width"]), WIDEST)))
    if "toggle" in message:
        return replace(choice, hidden=choice.hidden ^ {str(message["toggle"])})
    if message.get("zoom") is None:
        return replace(choice, window=None)
    axis, *places = message["zoom"]
    start, end = (to_time(snapshot, axis, float(place)) for place in places)
    missing = max(0.0, _NARROWEST - (end - start)) / 2
    start = max(0.0, start - missing)
    return replace(choice, window=(start, max(end + missing, start + _NARROWEST)))


@cache
def script() -> str:
    """The script as HTML: an image that cannot be loaded runs it, in all front ends that run any."""
    source = Path(__file__).with_suffix(".js").read_text(encoding="utf-8").strip()
    return f'<img src="data:," alt="" onerror="{safe(f"this.onerror = null; ({source})(this)")}">'


def download(name: str, mime_type: str, content: bytes, number: int) -> str:
    """A link to a file that is followed at once, as HTML; where no scripts run, it can be clicked.

    :param name: of the file
    :param number: another one for each time that it is asked for, so that the page learns of it
    """
    link = f"data:{mime_type};base64,{base64.b64encode(content).decode()}"
    follow = "this.onerror = null; this.previousElementSibling.click(); this.previousElementSibling.hidden = true"
    return (
        f'<a class="hivenb-note" data-number="{number}" download="{safe(name)}" href="{link}">{safe(name)}</a>'
        f'<img hidden src="data:," alt="" onerror="{follow}">'
    )


# -- under pointer ---------------------------------------------------------------------------------------------------
#
# What a picture of the charts shows at each place, for the layer that answers a pointer, and as words.
#
# The layer is ``pointer.js``; it is given these facts with each picture, and needs no kernel to tell a value.


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
        start, end = (formats.duration(seconds) for seconds in choice.window)
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
