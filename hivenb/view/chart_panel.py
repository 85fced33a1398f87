"""The picture in the dashboard, and what can be chosen about it."""

from __future__ import annotations

import csv
import io
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from hivenb.figures.history import Snapshot
from hivenb.view.charts.drawing import ChartImage
from hivenb.view.charts.panels import AXES, SMOOTHING, WIDTH, ChartChoice, panels, to_axis
from hivenb.view.charts.pointer import ChartPointer, download, facts
from hivenb.view.empty_states import ANY_TIME, Situation
from hivenb.view.help import with_help
from hivenb.view.notebook_output import require_ipywidgets

# -- chart table -----------------------------------------------------------------------------------------------------
#
# What the charts show as a table, for a spreadsheet.


_HEAD = ("chart", "series", "seconds", "value", "low", "high")


def as_csv(snapshot: Snapshot, choice: ChartChoice) -> str:
    """Every point of every line within the window, also of those that are switched off, as CSV with a head.

    A point may stand for several values, whose extremes are in ``low`` and ``high``. Where a chart is drawn against
    epochs or samples, a column says which.

    :param snapshot: of the run's history
    :param choice: what is shown of it
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    extra = () if choice.axis == "time" else (choice.axis,)
    writer.writerow((*_HEAD, *extra))
    for panel in [panel for row in panels(snapshot, choice.axis, choice.log) for panel in row]:
        for line in panel.lines:
            points = line.points
            places = np.asarray(to_axis(snapshot, choice.axis)(points.times), float)
            for at, value, low, high, place in zip(
                points.times, points.values, points.lows, points.highs, places, strict=True
            ):
                if choice.window is None or choice.window[0] <= at <= choice.window[1]:
                    numbers = (f"{at:.3f}", *(f"{number:.9g}" for number in (value, low, high)))
                    further = (f"{place:.6g}",) if panel.axis != "time" else ("",)
                    writer.writerow((panel.title, line.word, *numbers, *(further if extra else ())))
    return file.getvalue()


# -- chart panel -----------------------------------------------------------------------------------------------------


#: Share of one core's time that drawing may take: whatever it takes, a training that is bound by Python lacks.
_DRAWING_SHARE = 0.01

#: Seconds between two pictures at most, however slow the machine.
_LONGEST_PAUSE = 5.0

#: Seconds for which a file that was asked for is kept for the page.
_KEPT = 10.0


class ChartPanel:
    """The charts, and above them a choice of what the loss is drawn against, of its scale, and of the paper.

    A pointer over the charts is told their values, and can choose a window of time and switch series off.

    :param changed: called when something else was chosen, on whichever thread ipywidgets likes
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        widgets = require_ipywidgets()
        self._chart = ChartImage()
        self._changed = changed
        self._drawn: tuple[int, ChartChoice, Situation] | None = None
        self._snapshot: Snapshot | None = None
        self._now = ANY_TIME
        self._pointed = ChartChoice()
        self._files: deque[str] = deque()
        self._due = self._kept_until = 0.0
        self._given = 0
        self._told: dict[str, Any] = {}
        self.axis = self._dropdown("loss over", AXES, AXES[0], "150px")
        self.smoothing = self._dropdown("smoothing", SMOOTHING, ChartChoice().smoothing, "166px")
        self.log, self.dark = self._checkbox("log scale"), self._checkbox("dark")
        self._choices = (self.axis, self.smoothing, self.log, self.dark)
        for choice in self._choices:
            choice.observe(self._choose, names="value")
        self.csv = self._button("CSV", "save what the charts show as a table")
        self.png = self._button("PNG", "save the charts as a picture")
        self._download = widgets.HTML(layout=widgets.Layout(margin="0"))
        row = widgets.HBox(
            [self.axis, *self._with_help(), self.csv, self.png, self._download],
            layout=widgets.Layout(
                flex_flow="row wrap", justify_content="flex-end", align_items="center", overflow="visible"
            ),
        )
        row.add_class("hivenb-choices")
        row.add_class("hivenb-low")
        self.image = widgets.Image(format="png", layout=widgets.Layout(width="100%", height="auto", margin="0"))
        self.image.add_class("hivenb-charts")
        self.pointer = ChartPointer(changed)
        picture = widgets.VBox([self.image, *self.pointer.widgets])
        picture.add_class("hivenb-picture")
        self.widget = widgets.VBox(
            [row, picture],
            layout=widgets.Layout(flex="3 1 600px", max_width=f"{WIDTH}px", min_width="0", overflow="visible"),
        )

    @property
    def choice(self) -> ChartChoice:
        """What is chosen now, above the picture and in it."""
        return replace(
            self._pointed,
            axis=self.axis.value,
            log=self.log.value,
            dark=self.dark.value,
            smoothing=self.smoothing.value,
        )

    @property
    def drawn_version(self) -> int:
        """The version of the history that the picture shows; -1 before the first."""
        return -1 if self._drawn is None else self._drawn[0]

    def update(self, snapshot: Snapshot, at_once: bool = False, now: Situation | None = None) -> None:
        """Show this snapshot, unless that is what is shown already, or it is too early for another picture.

        :param at_once: however early it is, as for the last picture of a run; what a person has chosen is shown at once
        :param now: where the run stands; by default where it stood last
        """
        self._snapshot, self._now = snapshot, self._now if now is None else now
        self._pointed = self.pointer.apply(self._pointed, snapshot)
        wanted = (snapshot.version, self.choice, self._now)
        is_chosen = self._drawn is None or wanted[1:] != self._drawn[1:]
        if wanted != self._drawn and (at_once or is_chosen or time.monotonic() >= self._due):
            self._draw(snapshot, self.choice)
            self._drawn = wanted
        self._give_files(snapshot)

    def refresh(self) -> None:
        """Show what a person has chosen since, of what was shown last."""
        if self._snapshot is not None:
            self.update(self._snapshot)

    def _draw(self, snapshot: Snapshot, choice: ChartChoice) -> None:
        began, worked = time.monotonic(), time.thread_time()
        png, picture = self._chart.drawn(snapshot, choice, self._now)
        # JupyterLab's dark theme turns the colours of a picture on white paper; see hivenb.view.style
        (self.image.add_class if choice.dark else self.image.remove_class)("hivenb-dark")
        self._told = facts(picture, choice)
        self.pointer.tell(self._told)
        self.image.value = png
        self._due = began + min((time.thread_time() - worked) / _DRAWING_SHARE, _LONGEST_PAUSE)

    def _give_files(self, snapshot: Snapshot) -> None:
        while self._files:
            if self._files.popleft() == "CSV":
                content, name, kind = as_csv(snapshot, self.choice).encode(), "hivenb-charts.csv", "text/csv"
            else:
                content, name, kind = self.image.value, "hivenb-charts.png", "image/png"
            self._given += 1
            self._download.value = download(name, kind, content, self._given)
            self._kept_until = time.monotonic() + _KEPT
        if self._download.value and time.monotonic() >= self._kept_until:
            self._download.value = ""

    def close(self) -> None:
        """Leave the picture as it is; a pointer is still told what it shows."""
        self._download.value = ""
        for choice in (*self._choices, self.csv, self.png):
            choice.disabled = True
        if self._told:
            self.pointer.tell({**self._told, "closed": True})

    def _choose(self, _: Any) -> None:
        self._changed()

    def _button(self, word: str, tooltip: str) -> Any:
        def ask(_: Any) -> None:
            self._files.append(word)
            self._changed()

        widgets = require_ipywidgets()
        layout = widgets.Layout(width="44px", margin="0 0 0 4px", padding="0")
        button = widgets.Button(description=word, tooltip=tooltip, layout=layout)
        button.on_click(ask)
        return button

    def _with_help(self) -> list[Any]:
        return [
            with_help(self.smoothing, "over how many neighbours the training loss is averaged; the thin line is not"),
            with_help(self.log, "a logarithmic scale for the loss"),
            with_help(self.dark, "light ink on dark paper; in a dark JupyterLab the charts are dark anyway"),
        ]

    @staticmethod
    def _dropdown(word: str, values: Any, value: str, width: str) -> Any:
        widgets = require_ipywidgets()
        return widgets.Dropdown(
            options=[(name, name) for name in values],
            value=value,
            description=word,
            layout=widgets.Layout(width=width),
            style={"description_width": "auto"},
        )

    @staticmethod
    def _checkbox(word: str) -> Any:
        widgets = require_ipywidgets()
        layout = widgets.Layout(width="auto", margin="0 0 0 8px")
        return widgets.Checkbox(description=word, indent=False, layout=layout)
