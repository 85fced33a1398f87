"""The last lines of the run's log, and the run's options as a script."""

from __future__ import annotations

from collections.abc import Sequence

from hivenb.view.dashboard_state import DashboardState
from hivenb.view.display import require_ipywidgets
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
