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

from hivenb.figures.history import Snapshot
from hivenb.view.chart_choice import NARROWEST, WIDEST, ChartChoice
from hivenb.view.display import require_ipywidgets
from hivenb.view.horizontal_axis import to_time
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
        """Give the page what the next picture shows; see :mod:`hivenb.view.under_pointer`."""
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
