"""The list of all that is marked on the charts, with the numbers that stand there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hivenb.figures.advice import Advice, in_words
from hivenb.figures.earlier_history import whole
from hivenb.view import formats, theme
from hivenb.view.charts.drawing import numbered
from hivenb.view.dashboard_state import DashboardState
from hivenb.view.log_panel import AdviceRow, Apply
from hivenb.view.marks import Numbered
from hivenb.view.notebook_output import require_ipywidgets
from hivenb.view.style import note, safe

#: A list of hundreds is of no use.
MAX_ROWS = 100

NOTHING = "Nothing is marked on the charts yet: starts, pauses, changed options, peers and failed rounds will be."


class MarksPanel:
    """A table of what was marked, the newest first; above it, with a button each, the changes that are better undone.

    :param take_back: called with the former values of options when a person presses such a button; the front end's
        handlers call it, so it must return at once
    """

    def __init__(self, take_back: Apply) -> None:
        widgets = require_ipywidgets()
        self._take_back = take_back
        self._shown: tuple[Sequence[Numbered], Mapping[int, Advice]] | None = None
        # One for each rule, for good: a press must never reach another one that has just moved to its place.
        self._rows: dict[str, AdviceRow] = {}
        self._undone: list[str] = []
        self.table = widgets.HTML(layout=widgets.Layout(margin="0", overflow="auto", max_height="260px"))
        self.widget = widgets.VBox([self.table], layout=widgets.Layout(overflow="visible"))

    @property
    def buttons(self) -> dict[str, Any]:
        """The button of each change that is better undone, by the rule of its advice."""
        return {rule: self._rows[rule].button for rule in self._undone}

    def update(self, now: DashboardState) -> None:
        """Show what is marked by now."""
        marks = numbered(whole(now.snapshot))  # as the charts have them
        shown = marks, _by_number(marks, now.advice)
        if shown != self._shown:
            self._shown, self.table.value = shown, marks_html(*shown)
            self._show(shown[1])
        for rule in self._undone:
            self._rows[rule].look(now.options)

    def close(self) -> None:
        """Grey the buttons out."""
        for row in self._rows.values():
            row.button.disabled = True

    def _show(self, advice: Mapping[int, Advice]) -> None:
        for number, one in advice.items():
            if one.rule not in self._rows:
                self._rows[one.rule] = AdviceRow(self._take_back, "Take back")
            self._rows[one.rule].show(one, f"<div>{number}: back to</div>{note(in_words(one.changes))}")
        rules = [one.rule for one in advice.values()]
        if rules != self._undone:
            self._undone = rules
            self.widget.children = [*(self._rows[rule].widget for rule in rules), self.table]


def _by_number(marks: Sequence[Numbered], advice: Sequence[Advice]) -> dict[int, Advice]:
    """Advice that takes a mark back, by the mark's number."""
    changes = {id(one.event.change): one for one in advice if one.event is not None}
    return {one.number: changes[id(one.event.change)] for one in marks if id(one.event.change) in changes}


def marks_html(marks: Sequence[Numbered], advice: Mapping[int, Advice]) -> str:
    """Numbers, times and words, the newest first.

    :param advice: what is to be said of a mark, by its number
    """
    if not marks:
        return note(NOTHING)
    head = '<tr><th class="number">number</th><th>since the first start</th><th>what happened</th></tr>'
    shown = marks[-MAX_ROWS:][::-1]
    rows = "".join(_row(one, advice.get(one.number)) for one in shown)
    left_out = len(marks) - len(shown)
    more = note(f"and {formats.counted(left_out, 'older mark')}") if left_out else ""
    return f'<table class="hivenb-table hivenb-marks"><thead>{head}</thead><tbody>{rows}</tbody></table>{more}'


def _row(one: Numbered, advice: Advice | None) -> str:
    said = "" if advice is None else note(advice.text)
    return (
        f'<tr><td class="number"><span class="kind" style="background: {theme.EVENTS[one.event.kind]}"></span>'
        f"{one.number}</td><td>{safe(formats.duration(one.event.time))}</td>"
        f'<td class="words">{safe(one.event.text)}{said}</td></tr>'
    )
