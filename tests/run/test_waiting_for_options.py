"""Who waits for options to be in force learns what has come of them, whatever that is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hivenb.errors import TrainingError
from hivenb.figures.history import History
from hivenb.options import Options
from hivenb.options.swarm_wide import shared_part
from hivenb.peers.followed_run import Followers
from hivenb.run.live_options import RunOptions
from hivenb.run.pause_and_stop import Stage
from hivenb.run.status import RunState
from hivenb.swarm.agreement.options_record import Plan


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


class Host:
    """Decides for another peer as well, for the epoch after the present one."""

    is_alone, not_host_reason, refusal = False, None, None

    def __init__(self, shared: Any) -> None:
        self.epoch, self.plan = 0, Plan(0, ((0, shared),))

    def decide(self, shared: Any, *_: Any) -> None:
        if shared != self.plan.newest:
            self.plan = self.plan.changed(shared, self.epoch + 1, self.epoch)

    def wanted(self, *_: Any, **__: Any) -> Any:
        return self.plan.at(self.epoch)

    def note_epoch(self) -> None:
        self.epoch += 1


def hosted(stage: Stage) -> tuple[RunOptions, Callable[..., None]]:
    """Options at the host of a run of two, and what changes them at once, without waiting for what waits."""
    made = RunOptions(Options(target_batch_size=64), stage, History(), Followers())
    made.begin(SimpleNamespace(change_options=lambda options: None, optimizer=None))  # type: ignore[arg-type]
    made.hosting = Host(shared_part(made.in_force))  # type: ignore[assignment]

    def change(**changes: Any) -> None:
        made.apply(None, changes, wait=False)
        stage.do_tasks()

    return made, change


def test_what_waits_for_an_epoch_takes_back_nothing_that_came_after_it(stage: Stage) -> None:
    options, change = hosted(stage)
    change(target_batch_size=96)
    change(grad_compression="float16")
    assert options.pending == options.in_force.replace(target_batch_size=96)
    change(matchmaking_time=3.0)
    assert (options.in_force.grad_compression, options.in_force.matchmaking_time) == ("float16", 3.0)
    assert options.in_force.target_batch_size == 64
    change(average_state_every=2)
    change(verbose=True)
    wanted = options.in_force.replace(target_batch_size=96, average_state_every=2)
    assert options.pending == wanted
    for _ in range(2):
        options.on_epoch()
        stage.do_tasks()
    assert (options.in_force, options.pending, options.error) == (wanted, None, None)


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
