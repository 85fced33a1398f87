"""The list of all that is marked on the charts, with the numbers that stand there."""

from __future__ import annotations

from collections.abc import Sequence

from hivenb.figures.earlier_history import whole
from hivenb.view import theme, words
from hivenb.view.charts.drawing import numbered
from hivenb.view.dashboard_state import DashboardState
from hivenb.view.display import require_ipywidgets
from hivenb.view.marks import Numbered
from hivenb.view.style import note, safe

#: A list of hundreds is of no use.
MAX_ROWS = 100

NOTHING = "Nothing is marked on the charts yet: starts, pauses, changed options, peers and failed rounds will be."


class MarksPanel:
    """A table of what was marked, the newest first."""

    def __init__(self) -> None:
        widgets = require_ipywidgets()
        self._shown: Sequence[Numbered] | None = None
        self.widget = widgets.HTML(layout=widgets.Layout(margin="0", overflow="auto", max_height="260px"))

    def update(self, now: DashboardState) -> None:
        """Show what is marked by now."""
        marks = numbered(whole(now.snapshot))  # as the charts have them
        if marks != self._shown:
            self._shown, self.widget.value = marks, marks_html(marks)


def marks_html(marks: Sequence[Numbered]) -> str:
    """Numbers, times and words, the newest first."""
    if not marks:
        return note(NOTHING)
    head = '<tr><th class="number">number</th><th>since the first start</th><th>what happened</th></tr>'
    shown = marks[-MAX_ROWS:][::-1]
    rows = "".join(
        f'<tr><td class="number"><span class="kind" style="background: {theme.EVENTS[one.event.kind]}"></span>'
        f"{one.number}</td><td>{safe(words.duration(one.event.time))}</td>"
        f'<td class="words">{safe(one.event.text)}</td></tr>'
        for one in shown
    )
    left_out = len(marks) - len(shown)
    more = note(f"and {words.counted(left_out, 'older mark')}") if left_out else ""
    return f'<table class="hivenb-table hivenb-marks"><thead>{head}</thead><tbody>{rows}</tbody></table>{more}'
