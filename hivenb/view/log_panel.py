"""The last lines of the run's log, and the run's options as a script."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hivenb.figures.advice import Advice, in_words
from hivenb.figures.recent_rounds import LEAST_ROUNDS
from hivenb.options.options import FIELDS
from hivenb.view.dashboard_state import DashboardState, OptionsState
from hivenb.view.notebook_output import require_ipywidgets
from hivenb.view.style import copy_button, note, safe

MAX_LINES = 100
MAX_LETTERS = 500


class LogPanel:
    """The log's tail, newest line first: that is what a person opens it for, and no page has to scroll to it."""

    def __init__(self) -> None:
        widgets = require_ipywidgets()
        self.widget = widgets.HTML(layout=widgets.Layout(margin="0"))

    def update(self, now: DashboardState) -> None:
        """Show the latest log."""
        self.widget.value = log_html(now.log)


class CodePanel:
    """The same configuration as a plain Lightning script."""

    def __init__(self) -> None:
        widgets = require_ipywidgets()
        self.widget = widgets.HTML(layout=widgets.Layout(margin="0"))

    def update(self, now: DashboardState) -> None:
        """Show the options in force, with the names that model and data have."""
        says = note("The same configuration as a plain Lightning script:")
        code = f"<pre>{safe(now.options.code)}</pre>{copy_button('copy the script')}"
        self.widget.value = f'{says}<div class="hivenb-code">{code}</div>'


def log_html(lines: Sequence[str]) -> str:
    """The last lines, newest at the top; long ones are cut."""
    if not lines:
        return note("nothing logged yet")
    newest = lines[: -MAX_LINES - 1 : -1]
    shown = [line if len(line) <= MAX_LETTERS else line[: MAX_LETTERS - 1] + "…" for line in newest]
    return f'{note("newest first")}<div class="hivenb-log"><pre>{safe(chr(10).join(shown))}</pre></div>'


# -- advice panel ----------------------------------------------------------------------------------------------------
#
# What the figures suggest to change, each with a button that does it.


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
        self._nothing = widgets.HTML(note(NOTHING), layout=widgets.Layout(margin="0"))
        # One row for each rule, for good: a press must never reach an advice that has just moved to its place.
        self._rows: dict[str, AdviceRow] = {}
        self.widget = widgets.VBox([self._nothing], layout=widgets.Layout(overflow="visible"))

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
        if now.advice != self._shown:
            self._show(now.advice)
        for advice in self._shown:
            self._rows[advice.rule].look(now.options)

    def _show(self, found: tuple[Advice, ...]) -> None:
        for advice in found:
            if advice.rule not in self._rows:
                self._rows[advice.rule] = AdviceRow(self._apply)
            self._rows[advice.rule].show(advice, advice_html(advice))
        rules = [advice.rule for advice in found]
        if rules != [advice.rule for advice in self._shown]:
            self.widget.children = [self._rows[rule].widget for rule in rules] or [self._nothing]
        self._shown = found

    def close(self) -> None:
        """Grey the buttons out."""
        for row in self._rows.values():
            row.button.disabled = True


class AdviceRow:
    """One advice, with a button that does it.

    :param apply: called with its changes, as by :class:`AdvicePanel`
    :param description: of the button
    :ivar changes: what its button does
    """

    def __init__(self, apply: Apply, description: str = "Apply") -> None:
        widgets = require_ipywidgets()
        self.changes: Mapping[str, Any] = {}
        self._description, self._html, self._locked = description, "", ""
        self._says = widgets.HTML(layout=widgets.Layout(flex="1 1 300px", min_width="0"))
        self.button = widgets.Button(
            description=description, layout=widgets.Layout(flex="0 0 auto", width="90px", margin="0 0 0 14px")
        )
        self.button.on_click(lambda _: apply(self.changes))
        self.widget = widgets.HBox(
            [self._says, self.button],
            layout=widgets.Layout(align_items="center", margin="2px 0 6px 0", overflow="visible"),
        )

    def show(self, advice: Advice, html: str) -> None:
        """Show an advice.

        :param html: its words
        """
        self.changes, self._html = advice.changes, html
        self.button.layout.display = None if advice.changes else "none"  # what helps may be no option
        self._says.value = html + self._locked
        # for those who would rather do it in code
        self.button.tooltip = f"run.apply({', '.join(f'{name}={value!r}' for name, value in advice.changes.items())})"

    def look(self, options: OptionsState) -> None:
        """See whether the button was pressed, and whether it may be."""
        # it goes only when its change is in force; until then, that it was pressed is to be seen
        is_asked_for = options.asks_for(self.changes)
        is_locked = options.locked is not None and any(FIELDS[name].swarm_wide for name in self.changes)
        self._locked = note(f"Not to be changed here: {options.locked}.") if is_locked else ""
        self._says.value = self._html + self._locked
        self.button.disabled = is_asked_for or is_locked
        self.button.description = "Asked for" if is_asked_for else self._description


def advice_html(advice: Advice) -> str:
    """An advice's sentence, and below it what would change."""
    return f"<div>{safe(advice.text)}</div>{note(in_words(advice.changes))}"
