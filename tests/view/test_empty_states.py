"""What stands where there is nothing to see yet is true in each state of a run, and the same wherever it stands."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hivenb.run.status import RunState
from hivenb.view import empty_states
from hivenb.view.chart_panel import ChartPanel
from hivenb.view.charts.panels import panels
from hivenb.view.dashboard_state import DashboardState
from hivenb.view.empty_states import Situation, no_loss, no_peers_drawn, no_peers_listed, none_of
from hivenb.view.peers_panel import PeersPanel
from hivenb.view.run_panel import ENABLED
from hivenb.view.text import summary

STATES = [state.value for state in RunState]


def everything(now: Situation) -> list[str]:
    said = [no_loss(now), no_peers_drawn(now), no_peers_listed(now), none_of("epoch", now), none_of("samples", now)]
    return [" ".join(text.split()) for text in said]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("swarm_is_open", [True, False])
@pytest.mark.parametrize("local", [0, 1, 2])
@pytest.mark.parametrize("coming", [0, 2])
def test_only_what_can_be_pressed_is_named(state: str, swarm_is_open: bool, local: int, coming: int) -> None:
    now = Situation(state, local=local, coming=coming, swarm_is_open=swarm_is_open)
    enabled = ENABLED[state] if swarm_is_open else frozenset()
    for text in everything(now):
        for button in ("Start", "Resume", "Stop", "Pause"):
            assert f"press {button}" not in text.replace("Press", "press") or button.lower() in enabled, (state, text)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("local", [1, 2])
def test_nobody_says_that_there_are_no_peers_where_some_are(state: str, local: int) -> None:
    for text in everything(Situation(state, local=local)):
        assert "no peers" not in text.lower()


def test_each_state_has_words_of_its_own_for_a_loss_that_is_not_there() -> None:
    said = {state: no_loss(Situation(state)) for state in STATES}
    assert len(set(said.values())) == len(STATES)
    assert said["training"] == "waiting for the first batch"
    assert "press Start" in said["ready"]
    assert "press Start" not in said["starting"] + said["training"] + said["stopping"]
    assert "press Resume" in said["paused"]


def test_nothing_is_promised_that_will_not_come() -> None:
    for state in ("stopped", "finished", "failed"):
        assert not any(" yet" in text for text in everything(Situation(state)))
    assert none_of("epoch", Situation("training")) == "no epoch yet"
    closed = everything(Situation("ready", swarm_is_open=False))
    assert not any(" yet" in text or "invite" in text or "Start" in text for text in closed)


def test_a_module_without_a_loss_and_a_helper_are_not_waited_for() -> None:
    assert no_loss(Situation("training", steps=2)) == "no loss: training_step returns none"
    assert "only helps" in no_loss(Situation("training", helps=True))


def test_peers_on_this_machine_are_spoken_of_as_what_they_do(scene: Any) -> None:
    scene.local_peers = scene.swarm.local_peers = tuple(
        SimpleNamespace(number=n, state="ready", peer_id=f"id{n}", why_ended="") for n in (1, 2)
    )
    now = DashboardState.of(scene)
    peers = PeersPanel(lambda count: None)
    peers.update(now)
    assert "2 peers on this machine: they wait for the run to start" in peers._table.value
    assert "no peers" not in summary(scene.status, now.snapshot, now=now.situation).lower()
    (_, (drawn, _), _) = panels(now.snapshot, now=now.situation)
    assert drawn.empty == "2 peers on this machine:\nthey wait for the run to start"
    scene.set(state=RunState.TRAINING)
    peers.update(DashboardState.of(scene))
    assert "Looking for peers" in peers._table.value


def test_the_picture_follows_the_state_though_nothing_was_recorded(scene: Any) -> None:
    panel = ChartPanel(lambda: None)
    seen = set()
    for state in RunState:
        scene.set(state=state, step=0)
        now = DashboardState.of(scene)
        panel.update(now.snapshot, now=now.situation)
        seen.add(bytes(panel.image.value))
    assert len(seen) == len(STATES)


def test_a_picture_of_no_moment_in_particular_asks_nobody_to_press() -> None:
    assert not any("ress" in text for text in (no_loss(empty_states.ANY_TIME), no_peers_drawn(empty_states.ANY_TIME)))
