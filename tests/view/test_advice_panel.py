"""The advice of the dashboard: what it says, and that a press does it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ipywidgets
import pytest

from hivenb.errors import SwarmError
from hivenb.figures.advice import Advice
from hivenb.history import History
from hivenb.run.status import RunState
from hivenb.view.dashboard import Dashboard, _View
from hivenb.view.dashboard_state import DashboardState
from hivenb.view.log_panel import NOTHING, AdvicePanel, advice_html
from hivenb.view.text import advice_line, summary

EVIL = "<script>alert('x')</script>"


def tell(history: History, rounds: int, size: int = 4, stalled: float = 0.0) -> None:
    """Further rounds of ten seconds with three other peers."""
    snapshot = history.snapshot()
    done = len(snapshot.series["group_size"]) if "group_size" in snapshot.series else 0
    for epoch in range(done + 1, done + rounds + 1):
        now = 1000.0 + 10 * epoch
        history.record("peers", 4, epoch=epoch, time=now - 1)
        history.record("stalled_seconds", stalled, epoch=epoch, time=now)
        history.record("group_size", size, epoch=epoch, time=now)
        history.record("peers", 4, epoch=epoch, time=now + 1)


@pytest.fixture
def panel() -> AdvicePanel:
    return AdvicePanel(lambda changes: None)


def test_what_no_option_helps_against_has_no_button(scene: Any, panel: AdvicePanel) -> None:
    scene.history.record("skipped_in_a_row", 3)
    panel.update(DashboardState.of(scene))
    assert "3 batches in a row were not finite" in words_of(panel)
    (button,) = panel.buttons.values()
    assert button.layout.display == "none"


@pytest.fixture
def dashboard(scene: Any) -> Iterator[Dashboard]:
    made = Dashboard(scene)
    yield made
    made.close()


@pytest.fixture
def view(dashboard: Dashboard) -> _View:
    assert dashboard.widget
    assert dashboard._view is not None
    return dashboard._view


def words_of(panel: AdvicePanel) -> str:
    return " ".join(
        part.value
        for child in panel.widget.children
        for part in (child.children if isinstance(child, ipywidgets.HBox) else [child])
        if isinstance(part, ipywidgets.HTML)
    )


def sent_by(widget: Any) -> list[Any]:
    """What a widget and all in it will send to the front end."""
    messages: list[Any] = []
    widget.observe(messages.append)
    for child in getattr(widget, "children", ()):
        child.observe(messages.append)
        for part in getattr(child, "children", ()):
            part.observe(messages.append)
    return messages


def test_without_advice_it_says_what_it_looks_at(scene: Any, panel: AdvicePanel) -> None:
    panel.update(DashboardState.of(scene))
    assert NOTHING in words_of(panel)
    assert "8 rounds" in NOTHING
    assert (panel.title, panel.buttons) == ("Advice", {})


def test_each_advice_has_its_figures_its_changes_and_a_button(scene: Any) -> None:
    pressed: list[Mapping[str, Any]] = []
    panel = AdvicePanel(pressed.append)
    tell(scene.history, 10, size=2, stalled=4.0)
    panel.update(DashboardState.of(scene))
    assert panel.title == "Advice (2)"
    text = words_of(panel)
    assert "100 % of the last 10 rounds fewer than 0.9 of the peers" in text
    assert "matchmaking time 10 seconds" in text
    assert "40 % of the time" in text
    on = "on: state averaging in background, optimizer step in background, gradient averaging in background, optimizer"
    assert on in text
    assert NOTHING not in text
    assert list(panel.buttons) == ["too few peers", "no overlap"]
    assert panel.buttons["too few peers"].tooltip == "run.apply(matchmaking_time=10.0)"
    panel.buttons["no overlap"].click()
    panel.buttons["too few peers"].click()
    assert [set(changes) for changes in pressed] == [
        {"delay_state_averaging", "delay_optimizer_step", "delay_grad_averaging", "offload_optimizer"},
        {"matchmaking_time"},
    ]


def test_nothing_is_sent_while_the_advice_is_the_same(scene: Any, panel: AdvicePanel) -> None:
    tell(scene.history, 40, size=2, stalled=4.0)
    panel.update(DashboardState.of(scene))
    messages = sent_by(panel.widget)
    scene.history.record("loss", 1.0)
    panel.update(DashboardState.of(scene))
    assert messages == []
    tell(scene.history, 40, size=3, stalled=4.0)
    panel.update(DashboardState.of(scene))
    assert [message["name"] for message in messages] == ["value"], "the sentence whose figures have changed"


def test_a_press_never_reaches_the_advice_that_moved_up(scene: Any) -> None:
    pressed: list[Mapping[str, Any]] = []
    panel = AdvicePanel(pressed.append)
    tell(scene.history, 10, size=2, stalled=4.0)
    panel.update(DashboardState.of(scene))
    seen = panel.buttons["too few peers"]
    tell(scene.history, 40, size=4, stalled=4.0)
    panel.update(DashboardState.of(scene))
    assert list(panel.buttons) == ["no overlap"]
    seen.click()
    assert pressed == [{"matchmaking_time": 10.0}]


def test_what_an_advice_says_is_text() -> None:
    assert "<script" not in advice_html(Advice("rule", EVIL, {}, {}))


def test_the_tab_counts_and_one_press_applies(scene: Any, view: _View, eventually: Callable[..., None]) -> None:
    assert view.tabs.get_title(1) == "Advice"
    tell(scene.history, 10, size=2, stalled=4.0)
    eventually(lambda: view.tabs.get_title(1) == "Advice (2)")
    threads: list[str] = []
    apply = scene.apply

    def marked(*args: Any, **changes: Any) -> Any:
        threads.append(threading.current_thread().name)
        scene.history.mark("option", "matchmaking time: 10.0", time=2000.0)
        return apply(*args, **changes)

    scene.apply = marked
    view.advice_panel.buttons["too few peers"].click()
    eventually(lambda: view.tabs.get_title(1) == "Advice")
    assert scene.options.matchmaking_time == 10.0
    assert threads == ["hivenb-dashboard"]
    assert NOTHING in words_of(view.advice_panel)
    assert [view.tabs.get_title(i) for i in range(4)] == ["Peers", "Advice", "Log", "Code"]


def test_widgets_are_written_from_the_one_thread(scene: Any, view: _View, eventually: Callable[..., None]) -> None:
    writers: set[str] = set()
    view.tabs.observe(lambda _: writers.add(threading.current_thread().name))
    view.advice_panel.widget.observe(lambda _: writers.add(threading.current_thread().name))
    tell(scene.history, 10, size=2)
    eventually(lambda: view.advice_panel.buttons)
    view.advice_panel.buttons["too few peers"].click()
    eventually(lambda: scene.options.matchmaking_time == 10.0)
    assert writers == {"hivenb-dashboard"}


def test_an_advice_that_is_refused_says_why_and_stays(scene: Any, view: _View, eventually: Callable[..., None]) -> None:
    def refuse(*args: Any, **changes: Any) -> None:
        raise SwarmError("only the host of the run can change that")

    scene.apply = refuse
    tell(scene.history, 10, size=2)
    eventually(lambda: view.advice_panel.buttons)
    view.advice_panel.buttons["too few peers"].click()
    eventually(lambda: "only the host of the run can change that" in view.run_panel._message.value)
    assert list(view.advice_panel.buttons) == ["too few peers"]


def test_a_press_has_an_echo_until_the_change_is_in_force(
    scene: Any, view: _View, eventually: Callable[..., None]
) -> None:
    scene.set(state=RunState.TRAINING)
    tell(scene.history, 10, size=2)
    eventually(lambda: view.advice_panel.buttons)
    button = view.advice_panel.buttons["too few peers"]
    assert (button.description, button.disabled) == ("Apply", False)
    button.click()
    eventually(lambda: (button.description, button.disabled) == ("Asked for", True))
    eventually(lambda: "As advised: matchmaking time 10 seconds" in view.run_panel._message.value)
    assert "At the next batch: matchmaking time." in view.run_panel._message.value
    scene.pending_options, scene.options_error = None, RuntimeError("no memory")
    eventually(lambda: (button.description, button.disabled) == ("Apply", False))


def test_a_closed_dashboard_applies_nothing(scene: Any) -> None:
    tell(scene.history, 10, size=2)
    made = Dashboard(scene)
    assert made.widget
    assert made._view is not None
    (button,) = made._view.advice_panel.buttons.values()
    made.close()
    assert button.disabled
    button.click()
    assert scene.options.matchmaking_time == 5.0


def test_the_text_has_a_line_of_advice(scene: Any, dashboard: Dashboard) -> None:
    assert "advice" not in dashboard.text()
    tell(scene.history, 10, size=2)
    last = dashboard.text().splitlines()[-1]
    assert last.startswith("advice: In 100 % of the last 10 rounds")
    assert not last.endswith("more)")
    tell(scene.history, 10, size=2, stalled=6.0)
    both = DashboardState.of(scene).advice
    assert advice_line(both).endswith(" (1 more)")
    assert summary(scene.status, scene.history.snapshot(), (), both).endswith("\n\n" + advice_line(both))


def test_the_state_works_out_the_advice_once(scene: Any) -> None:
    tell(scene.history, 10, size=2)
    now = DashboardState.of(scene)
    assert now.advice is now.advice
    assert len(now.advice) == 1
