"""The dashboard as a whole, with real widgets: steered by hand, and once with a run that really trains."""

from __future__ import annotations

import html
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import ipywidgets
import pytest

from hivenb.errors import HivenbError, SwarmError
from hivenb.run.status import RunState
from hivenb.swarm.swarm import Observers
from hivenb.view.dashboard import MAX_LIVE, Dashboard

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def dashboard(scene: Any) -> Iterator[Dashboard]:
    made = Dashboard(scene)
    yield made
    made.close()


def dashboards_at_work() -> int:
    return sum(thread.name == "hivenb-dashboard" for thread in threading.enumerate())


def test_nothing_happens_until_it_is_shown(scene: Any) -> None:
    before = dashboards_at_work()
    made = Dashboard(scene)
    assert repr(made) == "Dashboard(run 'lightning_run')"
    assert dashboards_at_work() == before
    made.close()


def test_the_first_frame_is_complete_at_once(dashboard: Dashboard) -> None:
    assert isinstance(dashboard.widget, ipywidgets.VBox)
    assert dashboard.widget is dashboard.widget
    assert dashboard._view is not None
    assert bytes(dashboard._view.chart_panel.image.value).startswith(PNG)
    assert "ready to start" in dashboard._view.run_panel._status.value


def test_the_picture_follows_the_history_and_rests_when_nothing_changes(
    scene: Any, dashboard: Dashboard, eventually: Callable[..., None]
) -> None:
    assert dashboard.widget
    view = dashboard._view
    assert view is not None
    messages: list[Any] = []
    view.chart_panel.image.observe(messages.append, names="value")
    view.run_panel._status.observe(messages.append, names="value")
    first = view.chart_panel.image.value
    scene.history.record("loss", 1.0)
    eventually(lambda: view.chart_panel.image.value != first)
    messages.clear()
    frames: list[int] = []
    real = view._show
    view._show = lambda *a: (frames.append(1), real(*a))  # type: ignore[method-assign,func-returns-value]
    looked = threading.Event()
    view._refresher.submit(looked.set)
    assert looked.wait(10)
    threading.Event().wait(1.2)
    assert (frames, messages) == ([], []), "two looks later nothing was drawn or sent"


def test_buttons_steer_the_run_from_the_one_thread(
    scene: Any, dashboard: Dashboard, eventually: Callable[..., None]
) -> None:
    assert dashboard.widget
    view = dashboard._view
    assert view is not None
    scene.snapshot_epoch = 10
    names = ("start", "pause", "roll_back", "resume", "stop")
    for name in names:
        eventually(lambda name=name: not view.run_panel.buttons[name].disabled)
        view.run_panel.buttons[name].click()
    eventually(lambda: len(scene.calls) == 5)
    assert scene.calls == [(name, "hivenb-dashboard") for name in names]
    eventually(lambda: "stopped" in view.run_panel._status.value)


def test_what_a_button_raises_is_shown_until_something_works(
    scene: Any, dashboard: Dashboard, eventually: Callable[..., None]
) -> None:
    assert dashboard.widget
    view = dashboard._view
    assert view is not None
    scene.failure = SwarmError("the swarm is closed; open it again")
    view.run_panel.buttons["start"].click()
    eventually(lambda: "the swarm is closed; open it again" in view.run_panel._message.value)
    scene.failure = None
    view.run_panel.buttons["start"].click()
    eventually(lambda: view.run_panel._message.value == "")


def test_a_dashboard_that_cannot_be_drawn_says_so(
    scene: Any, dashboard: Dashboard, eventually: Callable[..., None]
) -> None:
    assert dashboard.widget
    view = dashboard._view
    assert view is not None
    right = scene.status
    scene.status = None
    eventually(lambda: "could not be drawn" in view.run_panel._message.value)
    scene.status = right
    eventually(lambda: view.run_panel._message.value == "")


def test_a_switch_takes_along_what_it_needs(scene: Any, dashboard: Dashboard, eventually: Callable[..., None]) -> None:
    assert dashboard.widget
    view = dashboard._view
    assert view is not None
    view.options_panel.controls["delay_optimizer_step"].value = True
    eventually(lambda: view.options_panel.controls["offload_optimizer"].value)
    assert scene.options.delay_state_averaging is True
    eventually(lambda: "Also switched on" in view.run_panel._message.value)
    view.options_panel.controls["offload_optimizer"].value = False
    eventually(lambda: not view.options_panel.controls["delay_optimizer_step"].value)
    assert not scene.options.delay_optimizer_step


def test_a_switch_acts_on_a_run_that_trains(scene: Any, dashboard: Dashboard, eventually: Callable[..., None]) -> None:
    assert dashboard.widget
    view = dashboard._view
    assert view is not None
    scene.set(state=RunState.TRAINING)
    view.options_panel.controls["delay_optimizer_step"].value = True
    eventually(lambda: scene.pending_options is not None)
    assert scene.pending_options.offload_optimizer
    eventually(lambda: "At the next batch: " in view.run_panel._message.value)
    # it could not be done
    scene.options_error, scene.pending_options = RuntimeError("no memory"), None
    eventually(lambda: "RuntimeError: no memory" in view.run_panel._message.value)
    eventually(lambda: view.options_panel.controls["delay_optimizer_step"].value is False)


def test_a_wrong_number_never_reaches_the_run(
    scene: Any, dashboard: Dashboard, eventually: Callable[..., None]
) -> None:
    assert dashboard.widget
    view = dashboard._view
    assert view is not None
    panel = view.options_panel
    for written in ("-3", "many"):
        panel.controls["target_batch_size"].value = written
        eventually(lambda written=written: f"target_batch_size={written.strip()}" in _plain(panel))
    assert scene.options.target_batch_size == 2048
    assert view.run_panel._message.value == ""
    panel.controls["target_batch_size"].value = "4096"
    eventually(lambda: scene.options.target_batch_size == 4096)
    assert panel._wrong["target_batch_size"].value == ""


def _plain(panel: Any) -> str:
    return html.unescape(panel._wrong["target_batch_size"].value).replace("'", "")


def test_close_keeps_the_last_picture_and_ends_the_thread(scene: Any) -> None:
    before = dashboards_at_work()
    made = Dashboard(scene)
    assert made.widget
    view = made._view
    assert view is not None
    assert dashboards_at_work() == before + 1
    scene.history.record("loss", 1.0)
    made.close()
    made.close()
    assert dashboards_at_work() == before
    assert bytes(view.chart_panel.image.value).startswith(PNG)
    assert view.chart_panel.drawn_version == scene.history.version, "the last frame is the newest"
    view.run_panel.buttons["start"].click()
    view.options_panel.controls["offload_optimizer"].value = True
    assert scene.calls == []
    assert all(button.disabled for button in view.run_panel.buttons.values())


def test_of_many_dashboards_the_newest_are_live(scene: Any) -> None:
    before = dashboards_at_work()
    made = [Dashboard(scene) for _ in range(MAX_LIVE + 2)]
    for one in made:
        assert one.widget
    assert dashboards_at_work() == before + MAX_LIVE
    for one in made:
        one.close()
    assert dashboards_at_work() == before


def test_a_run_without_a_swarm_can_still_be_looked_at(scene: Any) -> None:
    class Closed:
        local_peers, is_open, who_can_join, blocked, can_ban = (), False, "invited only", (), True
        observers, newest_run_id, banned = Observers(), "hivenb", ()
        local = SimpleNamespace(to_come_to=lambda run: 0)

        @property
        def invite(self) -> str:
            raise SwarmError("the swarm 'default' is closed")

    scene.swarm = Closed()
    made = Dashboard(scene)
    assert made.widget
    assert made._view is not None
    assert "is closed" in made._view.run_panel._message.value
    made.close()


def test_too_short_an_interval_is_refused(scene: Any) -> None:
    with pytest.raises(HivenbError, match=r"0\.1 s is too short.*use 0\.5"):
        Dashboard(scene, refresh_interval=0.1)


def test_the_text_has_the_same_facts(dashboard: Dashboard) -> None:
    assert dashboard.text().startswith("ready to start  swarm epoch 14")


@pytest.mark.process
def test_the_interpreter_ends_with_a_dashboard_open() -> None:
    code = (
        "from hivenb.view.dashboard import Refresher\n"
        "Refresher(lambda: None, lambda e, k: None, interval=0.01).start()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.process
def test_watches_a_run_that_really_trains(eventually: Callable[..., None]) -> None:
    import hivenb
    from hivenb import tasks

    task = tasks.digits()
    with hivenb.Swarm("dashboard-test") as swarm:
        options = hivenb.Options(target_batch_size=256, matchmaking_time=1.0, run_id="dashboard-test")
        run = hivenb.TrainingRun(task.model, (task.train, task.validation), swarm=swarm, options=options)
        made = Dashboard(run)
        try:
            assert made.widget
            view = made._view
            assert view is not None
            empty = view.chart_panel.image.value
            view.run_panel.buttons["start"].click()
            eventually(lambda: run.status.epoch >= 1 and run.status.loss is not None, seconds=60)
            eventually(lambda: view.chart_panel.image.value != empty, seconds=10)
            eventually(lambda: "training" in view.run_panel._status.value, seconds=10)
            eventually(lambda: "this peer" in view.peers_panel._table.value, seconds=20)
            view.run_panel.buttons["stop"].click()
            eventually(lambda: run.status.state is RunState.STOPPED, seconds=30)
            eventually(lambda: not view.run_panel.buttons["start"].disabled, seconds=10)
            assert view._refresher.error is None
        finally:
            made.close()
            run.stop()


def test_the_charts_follow_what_is_chosen_about_them(scene: Any, eventually: Any) -> None:
    for second in range(30):
        scene.history.record("loss", 2.0 / (1 + second), epoch=second // 10, samples=32 * second, time=1000.0 + second)
    dashboard = Dashboard(scene)
    try:
        assert dashboard.widget is not None
        panel = dashboard._view.chart_panel
        seen = {bytes(panel.image.value)}
        for choice, value in ((panel.axis, "epochs"), (panel.log, True), (panel.dark, True), (panel.axis, "samples")):
            choice.value = value
            eventually(lambda: bytes(panel.image.value) not in seen)
            seen.add(bytes(panel.image.value))
        assert "hivenb-dark" in panel.image._dom_classes, "JupyterLab's own dark theme must not turn it again"
        panel.dark.value = False
        eventually(lambda: "hivenb-dark" not in panel.image._dom_classes)
    finally:
        dashboard.close()
    assert panel.axis.disabled
