"""The picture in the dashboard, and what can be chosen about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hivenb.history import Snapshot
from hivenb.view.charts import ChartImage
from hivenb.view.clock import AXES
from hivenb.view.display import require_ipywidgets


class ChartPanel:
    """The charts, and above them a choice of what the loss is drawn against, of its scale, and of the paper.

    :param changed: called when something else was chosen, on whichever thread ipywidgets likes
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        widgets = require_ipywidgets()
        self._chart = ChartImage()
        self._changed = changed
        self._drawn: tuple[Any, ...] | None = None
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
        self.widget = widgets.VBox([row, self.image], layout=widgets.Layout(flex="3 1 540px", min_width="0"))

    @property
    def choice(self) -> tuple[str, bool, bool]:
        """What is chosen now: axis, logarithmic scale, dark paper."""
        return self.axis.value, self.log.value, self.dark.value

    @property
    def drawn_version(self) -> int:
        """The version of the history that the picture shows; -1 before the first."""
        return -1 if self._drawn is None else self._drawn[0]

    def update(self, snapshot: Snapshot) -> None:
        """Show this snapshot, unless that is what is shown already."""
        axis, log, dark = self.choice
        wanted = (snapshot.version, axis, log, dark)
        if wanted != self._drawn:
            png = self._chart.png(snapshot, axis=axis, log=log, dark=dark)
            # JupyterLab's dark theme turns the colours of a picture on white paper; see hivenb.view.style
            (self.image.add_class if dark else self.image.remove_class)("hivenb-dark")
            self.image.value = png
            self._drawn = wanted

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
