"""See also tests/browser/test_live_control.py, where a cell runs and a person clicks."""

from __future__ import annotations

import ipywidgets
import pytest

from hivenb.view.notebook_output import let_clicks_through


class Comm:
    """One of ipykernel 7.4, as far as this is about it."""

    def _reply_subshell_for(self, data: object, default: str) -> None:
        return None


def test_messages_of_a_widget_and_all_in_it_take_the_way_that_the_page_has_chosen(monkeypatch) -> None:
    comms = {name: Comm() for name in ("box", "button")}
    button = ipywidgets.Button()
    box = ipywidgets.VBox([button, ipywidgets.HBox()])
    for widget, name in ((box, "box"), (button, "button")):
        monkeypatch.setitem(widget._trait_values, "comm", comms[name])
    let_clicks_through(box)
    for comm in comms.values():
        assert getattr(comm, "_reply_subshell_for", "gone") is None


@pytest.mark.parametrize("comm", [None, object()])
def test_without_subshells_nothing_changes(monkeypatch, comm) -> None:
    button = ipywidgets.Button()
    monkeypatch.setitem(button._trait_values, "comm", comm)
    let_clicks_through(button)
    assert not hasattr(comm, "_reply_subshell_for")
