"""The top of the dashboard: how far a run is, and messages that move nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hivenb.run.status import RunState
from hivenb.run.training_length import Length
from hivenb.view.dashboard import Dashboard
from hivenb.view.dashboard_state import DashboardState, RunHeader
from hivenb.view.run_panel import SWARM_CLOSED, RunPanel, status_html
from hivenb.view.style import message
from hivenb.view.text import progress, status_line


def words_of(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html)).strip()


@pytest.fixture
def panel() -> RunPanel:
    return RunPanel(
        "hivenb://invite", {name: lambda: None for name in ("start", "pause", "resume", "stop", "roll_back")}
    )


def test_the_header_names_the_run_and_says_how_long_it_has_trained_and_how_far_it_is(status: Any) -> None:
    text = words_of(status_html(status, RunHeader("digits", Length(125.0, 3, 10, "pass", 291.0))))
    assert text.startswith(
        "ready to start digits swarm epoch 14 pass 3 of 10 trained 2 min 5 s , about 4 min 51 s to go 3 peers"
    )
    assert "batch 1,500 of 6,000" in words_of(
        status_html(status, RunHeader("digits", Length(1.0, 1500, 6000, "batch", None)))
    )


def test_a_name_never_becomes_html(status: Any) -> None:
    assert "<img" not in status_html(status, RunHeader("<img src=x>"))


def test_the_number_of_peers_is_left_out_while_nobody_knows_it(status: Any) -> None:
    stopped = replace(status, state=RunState.STOPPED, num_peers=0)
    assert "peer" not in words_of(status_html(stopped, RunHeader("digits")))
    assert "peer" not in status_line(stopped)


def test_what_is_left_of_a_short_epoch_does_not_flicker(status: Any) -> None:
    assert progress(replace(status, eta_seconds=0.02)) == "1,310 / 2,048 samples, < 1 s left"
    assert progress(replace(status, eta_seconds=0.7)) == progress(replace(status, eta_seconds=0.02))
    assert "left" not in progress(replace(status, swarm_samples_per_second=2000.0)), "an epoch of one second"


def test_a_message_has_its_line_for_good_and_unfolds(scene: Any, panel: RunPanel) -> None:
    now = DashboardState.of(scene)
    panel.update(now, "")
    layout = panel._message.layout
    assert (layout.min_height, panel._message.value) == ("24px", "")
    panel.update(now, "", "As advised: matchmaking time 10 seconds.")
    assert "wrong" not in panel._message.value
    panel.update(now, "an error\nof two lines", "a remark")
    html = panel._message.value
    assert "remark" not in html
    assert "<summary" in html
    assert ">an error of two lines</summary><div>an error\nof two lines</div>" in html
    assert (layout.min_height, layout.display) == ("24px", None)
    assert message("") == ""


def test_once_the_swarm_is_closed_nothing_can_be_started_or_sent_to_others(scene: Any, panel: RunPanel) -> None:
    scene.set(state=RunState.STOPPED)
    panel.update(DashboardState.of(scene), "")
    assert not panel.buttons["start"].disabled
    scene.swarm.is_open = False
    panel.update(DashboardState.of(scene), "")
    assert all(button.disabled for button in panel.buttons.values())
    assert "hivenb://" not in panel._invite.value
    assert SWARM_CLOSED in panel._invite.value


def test_a_closed_swarm_takes_no_more_peers(scene: Any, eventually: Callable[..., None]) -> None:
    dashboard = Dashboard(scene)
    try:
        assert dashboard.widget
        view = dashboard._view
        assert view is not None
        scene.swarm.is_open = False
        eventually(lambda: view.peers_panel.slider.disabled and view.run_panel.buttons["start"].disabled)
    finally:
        dashboard.close()


def test_a_good_state_can_be_returned_to_once_there_is_one(scene: Any, panel: RunPanel) -> None:
    scene.set(state=RunState.TRAINING)
    button = panel.buttons["roll_back"]
    panel.update(DashboardState.of(scene), "")
    assert button.disabled
    assert "once there is one" in button.tooltip
    scene.snapshot_epoch = 40
    panel.update(DashboardState.of(scene), "")
    assert not button.disabled
    assert "epoch 40" in button.tooltip
    scene.set(state=RunState.STARTING)
    panel.update(DashboardState.of(scene), "")
    assert button.disabled
