"""What the history marks where options change, and where a run pauses: in words, and nothing where nothing changes."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from hivenb.figures.history import History
from hivenb.options import Options
from hivenb.peers.followed_run import Followers
from hivenb.run.live_options import RunOptions
from hivenb.run.pause_and_stop import Stage
from hivenb.run.status import RunState

OPTIONS = Options(target_batch_size=64)

#: A model that nobody changes in a pause.
UNTOUCHED = SimpleNamespace(hand_out=lambda: None, take_back=lambda trains_on: None)


def marks(history: History) -> list[str]:
    return [event.text for event in history.snapshot().events]


def test_a_switch_is_marked_as_what_it_resolves_to() -> None:
    history, stage = History(), Stage()
    options = RunOptions(OPTIONS, stage, history, Followers())
    stage.enter(RunState.STOPPED)
    options.apply(OPTIONS.with_prerequisites(delay_optimizer_step=True), {}, wait=False)
    assert marks(history) == [
        "state averaging in background: on",
        "optimizer step in background: on",
        "optimizer in main memory: on",
    ]
    options.apply(options.in_force.with_prerequisites(delay_state_averaging=False), {}, wait=False)
    assert marks(history)[3:] == ["state averaging in background: off", "optimizer step in background: off"]
    options.apply(None, {"offload_optimizer": None, "matchmaking_time": 10.0}, wait=False)
    assert marks(history)[5:] == ["optimizer in main memory: off", "matchmaking time: 10 seconds"]
    options.apply(None, {"offload_optimizer": False, "delay_optimizer_step": False}, wait=False)
    assert len(marks(history)) == 7, "off, and off as nothing needs it, are the same to a person"


def test_a_pause_is_noted_as_it_begins_and_ends() -> None:
    stage, noted = Stage(), list[str]()
    stage.enter(RunState.TRAINING)
    stage.close_gate()
    waiting = threading.Thread(target=stage.wait_at_gate, args=(noted.append, UNTOUCHED), daemon=True)
    waiting.start()
    assert stage.wait_until(lambda: stage.state is RunState.PAUSED, 10)
    assert noted == ["paused"]
    stage.open_gate()
    waiting.join(10)
    assert (noted, stage.state) == (["paused", "resumed"], RunState.TRAINING)


def test_a_pause_that_ends_in_a_stop_is_not_resumed() -> None:
    stage, noted = Stage(), list[str]()
    stage.enter(RunState.TRAINING)
    stage.close_gate()
    waiting = threading.Thread(target=stage.wait_at_gate, args=(noted.append, UNTOUCHED), daemon=True)
    waiting.start()
    assert stage.wait_until(lambda: stage.state is RunState.PAUSED, 10)
    stage.enter(RunState.STOPPING)
    waiting.join(10)
    assert (noted, stage.state) == (["paused"], RunState.STOPPING)
