"""What the figures suggest to change, each with a button that does it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hivenb.figures.advice import Advice, in_words
from hivenb.figures.recent_rounds import LEAST_ROUNDS
from hivenb.view.dashboard_state import DashboardState
from hivenb.view.display import require_ipywidgets
from hivenb.view.style import note, safe

NOTHING = (
    f"nothing to advise. From {LEAST_ROUNDS} rounds with other peers on, this looks at how many of the peers average "
    "together, how many rounds fail, and how long training stands still for them."
)

Apply = Callable[[Mapping[str, Any]], None]


class AdvicePanel:
    """A row for each advice: its sentence, what would change, and a button.

    :param apply: called with an advice's changes when a person presses its button; the front end's handlers call it,
        so it must return at once
    """

    def __init__(self, apply: Apply) -> None:
        widgets = require_ipywidgets()
        self._apply = apply
        self._shown: tuple[Advice, ...] = ()
        self._nothing = widgets.HTML(note(NOTHING), layout=widgets.Layout(width="100%"))
        # One row for each rule, for good: a press must never reach an advice that has just moved to its place.
        self._rows: dict[str, _Row] = {}
        self.widget = widgets.VBox([self._nothing], layout=widgets.Layout(width="100%"))

    @property
    def title(self) -> str:
        """How the panel is called at the moment: ``Advice (2)``."""
        return f"Advice ({len(self._shown)})" if self._shown else "Advice"

    @property
    def buttons(self) -> dict[str, Any]:
        """The button of each advice that is shown, by its rule."""
        return {advice.rule: self._rows[advice.rule].button for advice in self._shown}

    def update(self, now: DashboardState) -> None:
        """Show the advice as it is now."""
        if now.advice == self._shown:
            return
        for advice in now.advice:
            if advice.rule not in self._rows:
                self._rows[advice.rule] = _Row(self._apply)
            self._rows[advice.rule].show(advice)
        rules = [advice.rule for advice in now.advice]
        if rules != [advice.rule for advice in self._shown]:
            self.widget.children = [self._rows[rule].widget for rule in rules] or [self._nothing]
        self._shown = now.advice

    def close(self) -> None:
        """Grey the buttons out."""
        for row in self._rows.values():
            row.button.disabled = True


class _Row:
    """One advice."""

    def __init__(self, apply: Apply) -> None:
        widgets = require_ipywidgets()
        self._changes: Mapping[str, Any] = {}
        self._says = widgets.HTML(layout=widgets.Layout(flex="1 1 300px", min_width="0"))
        self.button = widgets.Button(
            description="Apply", layout=widgets.Layout(flex="0 0 auto", width="90px", margin="0 0 0 14px")
        )
        self.button.on_click(lambda _: apply(self._changes))
        self.widget = widgets.HBox(
            [self._says, self.button],
            layout=widgets.Layout(width="100%", align_items="center", margin="2px 0 6px 0"),
        )

    def show(self, advice: Advice) -> None:
        self._changes = advice.changes
        self.button.layout.display = None if advice.changes else "none"  # what helps may be no option
        self._says.value = advice_html(advice)
        # for those who would rather do it in code
        self.button.tooltip = f"run.apply({', '.join(f'{name}={value!r}' for name, value in advice.changes.items())})"


def advice_html(advice: Advice) -> str:
    """An advice's sentence, and below it what would change."""
    return f"<div>{safe(advice.text)}</div>{note(in_words(advice.changes))}"
