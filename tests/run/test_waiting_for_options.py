"""Who waits for options to be in force learns what has come of them, whatever that is."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from hivenb.errors import TrainingError
from hivenb.figures.history import History
from hivenb.options import Options
from hivenb.peers.followed_run import Followers
from hivenb.run.live_options import RunOptions
from hivenb.run.pause_and_stop import Stage
from hivenb.run.status import RunState


def exit_program(options: Options) -> None:
    raise SystemExit(3)


def fail(options: Options) -> None:
    raise ValueError("not like this")


@pytest.fixture
def stage() -> Stage:
    made = Stage()
    made.enter(RunState.TRAINING)
    return made


def waiting(stage: Stage, change_options: Any) -> tuple[threading.Thread, list[Exception], RunOptions]:
    """A thread that waits for other options, and what it is raised."""
    options, raised = RunOptions(Options(target_batch_size=64), stage, History(), Followers()), list[Exception]()
    options.begin(SimpleNamespace(change_options=change_options, optimizer=None))  # type: ignore[arg-type]

    def apply() -> None:
        try:
            options.apply(None, {"matchmaking_time": 10.0}, wait=True)
        except Exception as e:
            raised.append(e)

    thread = threading.Thread(target=apply, daemon=True)
    thread.start()
    assert stage.wait_until(lambda: stage.has_tasks, 10)
    return thread, raised, options


def test_what_ends_the_run_ends_the_waiting(stage: Stage) -> None:
    thread, raised, options = waiting(stage, exit_program)
    with pytest.raises(SystemExit):
        stage.do_tasks()
    thread.join(10)
    (error,) = raised
    assert isinstance(error, TrainingError)
    assert "SystemExit(3)" in str(error)
    assert options.in_force.matchmaking_time != 10.0


def test_what_is_refused_ends_the_waiting_and_not_the_run(stage: Stage) -> None:
    thread, raised, options = waiting(stage, fail)
    stage.do_tasks()
    thread.join(10)
    assert [str(error) for error in raised] == ["not like this"]
    assert options.error is raised[0]


def test_what_is_asked_for_too_late_is_for_the_next_start(stage: Stage) -> None:
    thread, raised, options = waiting(stage, fail)
    options.leave()
    stage.do_tasks()
    thread.join(10)
    assert raised == []
    assert options.in_force.matchmaking_time == 10.0
