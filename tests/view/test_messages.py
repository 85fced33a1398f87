"""Messages end: with what a person does next, with another state of the run, and remarks by themselves."""

from __future__ import annotations

from typing import Any

import pytest

from hivenb.view import messages
from hivenb.view.dashboard_state import DashboardState
from hivenb.view.marks_panel import NOTHING, MarksPanel
from hivenb.view.messages import Messages


def test_what_went_wrong_goes_with_the_next_action_or_another_state() -> None:
    said = Messages()
    said.say("the run is stopping", "stopping", is_trouble=True)
    assert said.trouble("stopping", None) == "the run is stopping"
    assert said.remark("stopping", is_pending=False) == ""
    assert said.trouble("stopped", None) == ""
    said.say("no", "stopped", is_trouble=True)
    said.act(None)
    assert said.trouble("stopped", None) == ""


def test_options_that_were_refused_are_said_until_something_else_is_done() -> None:
    said, refused = Messages(), RuntimeError("no memory")
    assert said.trouble("training", refused) == "RuntimeError: no memory"
    said.act(refused)
    assert said.trouble("training", refused) == ""
    again = RuntimeError("no memory")
    assert said.trouble("training", again) == "RuntimeError: no memory", "it was tried once more"


@pytest.mark.parametrize("is_pending", [True, False])
def test_a_remark_ends_by_itself_once_it_is_done(monkeypatch: Any, is_pending: bool) -> None:
    said = Messages()
    said.say("Also switched on: optimizer in main memory.", "training")
    assert said.remark("training", is_pending).startswith("Also")
    monkeypatch.setattr(messages, "KEPT", 0.0)
    assert bool(said.remark("training", is_pending)) is is_pending


def test_all_marks_are_listed_the_newest_first_and_harmless(scene: Any) -> None:
    panel = MarksPanel(lambda changes: None)
    panel.update(DashboardState.of(scene))
    assert NOTHING in panel.table.value
    scene.history.mark("run", "started", time=1000.0)
    scene.history.mark("option", "<script>x", time=1065.0)
    panel.update(DashboardState.of(scene))
    html = panel.table.value
    assert "<script" not in html
    assert html.index("&lt;script&gt;x") < html.index("started")
    assert "1 min 5 s" in html
