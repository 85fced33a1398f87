"""The list of marks: a change since which the loss has risen, and the button that takes it back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from hivenb.figures.history import OptionChange
from hivenb.run.status import RunState
from hivenb.view.dashboard import Dashboard, _View
from hivenb.view.dashboard_state import DashboardState
from hivenb.view.marks_panel import MarksPanel

CHANGED = {"delay_optimizer_step": True, "offload_optimizer": True, "delay_state_averaging": True}
SAID = "Since gradient averaging in background is on, the loss went from 0.28 to 0.56: take it back."


def let_rise(scene: Any, **changes: Any) -> None:
    """Forty epochs with the loss at 0.28, a change of options, and twenty at 0.56."""
    scene.options = scene.options.replace(**CHANGED)
    history = scene.history
    history.mark("run", "started", time=1000.0)
    for epoch in range(40):
        history.record("loss", 0.28, epoch=epoch, time=1000.5 + epoch)
    before, scene.options = scene.options, scene.options.replace(**changes)
    for name, values in before.difference(scene.options).items():
        history.mark("option", name, time=1040.0, change=OptionChange(name, *values))
    for epoch in range(40, 60):
        history.record("loss", 0.56, epoch=epoch, time=1000.5 + epoch)


def words_of(panel: MarksPanel) -> str:
    return "".join(row.children[0].value for row in panel.widget.children[:-1])


@pytest.fixture
def view(scene: Any) -> Iterator[_View]:
    dashboard = Dashboard(scene)
    assert dashboard.widget
    assert dashboard._view is not None
    yield dashboard._view
    dashboard.close()


def test_it_is_said_at_the_mark_with_a_button(scene: Any) -> None:
    pressed: list[Mapping[str, Any]] = []
    panel = MarksPanel(pressed.append)
    let_rise(scene, delay_grad_averaging=True)
    panel.update(DashboardState.of(scene))
    assert "2: back to" in words_of(panel), "the number of the mark"
    assert "off: gradient averaging in background" in words_of(panel)
    assert panel.table.value.index("delay_grad_averaging") < panel.table.value.index(SAID)
    assert panel.table.value.index(SAID) < panel.table.value.index("started")
    (button,) = panel.buttons.values()
    assert (button.description, button.disabled) == ("Take back", False)
    button.click()
    assert pressed == [{"delay_grad_averaging": False}]


def test_marks_after_those_of_earlier_runs_are_found_too(scene: Any) -> None:
    earlier = type(scene)()
    earlier.history.mark("run", "started", time=10.0)
    earlier.history.mark("option", "another", time=20.0)
    scene.history.begin_after(earlier.history.snapshot())
    panel = MarksPanel(lambda changes: None)
    let_rise(scene, delay_grad_averaging=True)
    panel.update(DashboardState.of(scene))
    assert "4: back to" in words_of(panel)
    assert panel.table.value.count(SAID) == 1


def test_without_harm_there_is_nothing_but_the_table(scene: Any) -> None:
    panel = MarksPanel(lambda changes: None)
    panel.update(DashboardState.of(scene))
    assert list(panel.widget.children) == [panel.table]
    assert panel.buttons == {}


def test_what_the_host_decides_cannot_be_taken_back_elsewhere(scene: Any) -> None:
    let_rise(scene, target_batch_size=512)
    scene.not_host_reason = "its host is <b>Ann</b>"
    panel = MarksPanel(lambda changes: None)
    panel.update(DashboardState.of(scene))
    (button,) = panel.buttons.values()
    assert button.disabled
    assert "Not to be changed here: its host is &lt;b&gt;Ann&lt;/b&gt;." in words_of(panel)
    scene.not_host_reason = None
    panel.update(DashboardState.of(scene))
    assert not button.disabled
    assert "Not to be changed" not in words_of(panel)


def test_a_press_takes_it_back_and_the_line_goes(scene: Any, view: _View, eventually: Callable[..., None]) -> None:
    threads: set[str] = set()
    view.marks_panel.widget.observe(lambda _: threads.add(threading.current_thread().name))
    scene.set(state=RunState.TRAINING)
    let_rise(scene, delay_grad_averaging=True)
    eventually(lambda: view.marks_panel.buttons)
    assert view.tabs.get_title(1) == "Advice (1)", "where all advice is"
    (button,) = view.marks_panel.buttons.values()
    button.click()
    eventually(lambda: (button.description, button.disabled) == ("Asked for", True))
    eventually(lambda: "Taken back: off: gradient averaging in background" in view.run_panel._message.value)
    assert scene.pending_options.delay_grad_averaging is False
    scene.options, scene.pending_options = scene.pending_options, None
    change = OptionChange("delay_grad_averaging", True, False)
    scene.history.mark("option", "off again", time=1061.0, change=change)
    eventually(lambda: not view.marks_panel.buttons)
    assert threads == {"hivenb-dashboard"}
    assert SAID not in view.marks_panel.table.value


def test_a_closed_dashboard_takes_nothing_back(scene: Any) -> None:
    let_rise(scene, delay_grad_averaging=True)
    made = Dashboard(scene)
    assert made.widget
    assert made._view is not None
    (button,) = made._view.marks_panel.buttons.values()
    made.close()
    assert button.disabled
    button.click()
    assert scene.options.delay_grad_averaging
