"""The picture in the dashboard, and what can be chosen about it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hivenb.figures.history import Snapshot
from hivenb.view.charts import ChartImage
from hivenb.view.display import require_ipywidgets
from hivenb.view.horizontal_axis import AXES

#: Share of one core's time that drawing may take: whatever it takes, a training that is bound by Python lacks.
_DRAWING_SHARE = 0.01

#: Seconds between two pictures at most, however slow the machine.
_LONGEST_PAUSE = 5.0


class ChartPanel:
    """The charts, and above them a choice of what the loss is drawn against, of its scale, and of the paper.

    :param changed: called when something else was chosen, on whichever thread ipywidgets likes
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        widgets = require_ipywidgets()
        self._chart = ChartImage()
        self._changed = changed
        self._drawn: tuple[Any, ...] | None = None
        self._due = 0.0
        self.axis = widgets.Dropdown(
            options=[(name, name) for name in AXES],
            description="loss over",
            layout=widgets.Layout(width="180px"),
            style={"description_width": "auto"},
        )
        self.log = self._checkbox("log scale", "a logarithmic scale for the loss")
        self.dark = self._checkbox("dark", "light ink on dark paper; in a dark JupyterLab the charts are dark anyway")
        self._choices = (self.axis, self.log, self.dark)
        for choice in self._choices:
            choice.observe(self._choose, names="value")
        self.image = widgets.Image(format="png", layout=widgets.Layout(width="100%", height="auto", margin="0"))
        row = widgets.HBox(
            self._choices, layout=widgets.Layout(flex_flow="row wrap", justify_content="flex-end", align_items="center")
        )
        self.widget = widgets.VBox(
            [row, self.image], layout=widgets.Layout(flex="3 1 600px", max_width="670px", min_width="0")
        )

    @property
    def choice(self) -> tuple[str, bool, bool]:
        """What is chosen now: axis, logarithmic scale, dark paper."""
        return self.axis.value, self.log.value, self.dark.value

    @property
    def drawn_version(self) -> int:
        """The version of the history that the picture shows; -1 before the first."""
        return -1 if self._drawn is None else self._drawn[0]

    def update(self, snapshot: Snapshot, at_once: bool = False) -> None:
        """Show this snapshot, unless that is what is shown already, or it is too early for another picture.

        :param at_once: however early it is, as for the last picture of a run; what a person has chosen is shown at once
        """
        wanted = (snapshot.version, *self.choice)
        is_chosen = self._drawn is None or wanted[1:] != self._drawn[1:]
        if wanted != self._drawn and (at_once or is_chosen or time.monotonic() >= self._due):
            self._draw(snapshot, *self.choice)
            self._drawn = wanted

    def _draw(self, snapshot: Snapshot, axis: str, log: bool, dark: bool) -> None:
        began, worked = time.monotonic(), time.thread_time()
        png = self._chart.png(snapshot, axis=axis, log=log, dark=dark)
        # JupyterLab's dark theme turns the colours of a picture on white paper; see hivenb.view.style
        (self.image.add_class if dark else self.image.remove_class)("hivenb-dark")
        self.image.value = png
        self._due = began + min((time.thread_time() - worked) / _DRAWING_SHARE, _LONGEST_PAUSE)

    def close(self) -> None:
        """Leave the picture as it is."""
        for choice in self._choices:
            choice.disabled = True

    def _choose(self, _: Any) -> None:
        self._changed()

    @staticmethod
    def _checkbox(word: str, tooltip: str) -> Any:
        widgets = require_ipywidgets()
        layout = widgets.Layout(width="auto", margin="0 0 0 16px")
        box = widgets.Checkbox(description=word, indent=False, layout=layout)
        if hasattr(box, "tooltip"):  # ipywidgets 8
            box.tooltip = tooltip
        return box
