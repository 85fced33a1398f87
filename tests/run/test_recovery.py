"""A part of a peer that is killed in the middle of training is started anew, and training goes on with the others."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from hivemind.utils import MPFuture
from tiny import DELAYS, PacedModel, in_large_batches, large_batches

import hivenb
from hivenb.engine.process import restart_count
from hivenb.errors import ProcessEndedError
from hivenb.options import Options
from hivenb.run.status import RunState
from hivenb.training import TrainingRun

pytestmark = pytest.mark.process

#: Seconds within which anything has to happen that has no bound of its own; the machine may be busy.
PATIENCE = 90.0

#: Seconds within which the end of a part is to be known.
NOTICED_WITHIN = 10.0

WAYS = [pytest.param({}, id="synchronous"), pytest.param(DELAYS, id="delayed", marks=pytest.mark.long)]

#: What can be killed, and what the others call it.
PARTS: dict[str, tuple[Callable[[TrainingRun], int], str]] = {
    "daemon": (lambda run: daemon_of(run.swarm), "p2pd, the daemon of the DHT"),
    "dht": (lambda run: run.swarm.dht.pid, "the process of the DHT"),
    "gradients": (lambda run: run.strategy.optimizer.grad_averager.pid, "the averager of gradients"),
    "state": (lambda run: run.strategy.optimizer.state_averager.pid, "the averager of the state"),
}

KILLED = r"\(process {pid}\),? was killed by signal 9 \(SIGKILL\), often by the system when memory runs out"


def kill_in_the_middle_of_an_answer(pid: int) -> None:
    """Kill a process, and let the lock be gone that each answer of one process to another takes."""
    if not (helper := os.fork()):
        MPFuture._update_lock.acquire()
        os.kill(pid, signal.SIGKILL)
        os._exit(0)
    os.waitpid(helper, 0)


def daemon_of(swarm: hivenb.Swarm) -> int:
    return next(child.pid for child in psutil.Process(swarm.dht.pid).children() if child.name() == "p2pd")


def options(name: str, **changes: Any) -> Options:
    # epochs of most of a second: in much shorter ones, peers on a busy machine hardly ever meet
    return Options(
        **{"target_batch_size": 640, "run_id": name, "matchmaking_time": 3.0, "averaging_timeout": 20.0, **changes}
    )


class Groups:
    """How many have averaged gradients in each epoch of a run, as it has told."""

    def __init__(self, run: TrainingRun):
        self.sizes: list[tuple[int, int]] = []
        self._told, tell = threading.Condition(), run.strategy.on_epoch

        def note(report: Any) -> None:
            tell(report)
            with self._told:
                self.sizes.append((report.epoch, report.group_size))
                self._told.notify_all()

        run.strategy.on_epoch = note

    def wait_for(self, size: int, since: int, run: TrainingRun) -> int:
        """The first epoch from that one on in which so many have met."""
        met: list[int] = []
        end = time.monotonic() + PATIENCE
        with self._told:
            while not (met := [epoch for epoch, group in self.sizes if group == size and epoch >= since]):
                assert run.status.state.is_active, run.exception
                assert time.monotonic() < end, f"{self.sizes}; {run.log_lines[-20:]}"
                self._told.wait(0.5)
        return met[0]


#: An epoch of a run that is alone is this short: it has nobody to meet.
ALONE = {"target_batch_size": 128}


def run_of(swarm: hivenb.Swarm, chosen: Options) -> TrainingRun:
    model = in_large_batches(PacedModel())
    return TrainingRun(model, large_batches(), swarm=swarm, options=chosen, accelerator="cpu")


def train_with_another(swarm: hivenb.Swarm, chosen: Options) -> tuple[TrainingRun, Groups]:
    """A run that has met a peer on this machine in a round."""
    run = run_of(swarm, chosen)
    run.start()
    groups = Groups(run)
    swarm.add_local_peers(1, run)
    groups.wait_for(2, since=0, run=run)
    return run, groups


def marks_of(title: str, run: TrainingRun) -> int:
    """How often a run has said that this was started anew."""
    return sum(title in event.text for event in run.history.snapshot().events)


def wait_for_mark(title: str, run: TrainingRun, count: int) -> None:
    """Wait until a run that trains has said so often that something was started anew."""
    end = time.monotonic() + PATIENCE
    while marks_of(title, run) < count:
        assert run.status.state.is_active, run.exception
        assert time.monotonic() < end, run.log_lines[-20:]
        time.sleep(0.1)


@pytest.mark.parametrize("delays", WAYS)
@pytest.mark.slow
def test_parts_that_are_killed_are_started_anew_and_the_peers_meet_again(swarm, monkeypatch, delays):
    """One after the other, in one run, which would end of so many in a minute."""
    monkeypatch.setattr(restart_count, "MOST_RESTARTS", len(PARTS))
    run, groups = train_with_another(swarm, options("killed", **delays))
    peer_id, addresses = swarm.peer_id, swarm.addresses
    for part, (pid_of, title) in PARTS.items():
        pid, before = pid_of(run), marks_of(title, run)
        os.kill(pid, signal.SIGKILL)
        wait_for_mark(title, run, before + 1)
        groups.wait_for(2, since=run.status.epoch + 2, run=run)
        assert swarm.dht.peer_id.to_base58() == swarm.peer_id == peer_id, part
        assert swarm.addresses == addresses, f"{part}: an invite that was given away is good still"
        assert pid_of(run) != pid
        assert any(f"process {pid}" in line and "signal 9 (SIGKILL)" in line for line in run.log_lines), part
    run.stop()
    assert run.status.state is RunState.STOPPED


@pytest.mark.parametrize("delays", WAYS)
@pytest.mark.slow
def test_those_that_are_killed_in_the_middle_of_an_answer_are_started_anew_as_well(swarm, monkeypatch, delays):
    monkeypatch.setattr(restart_count, "MOST_RESTARTS", 6)
    run, groups = train_with_another(swarm, options("answering", **delays))
    for part in ("dht", "state"):
        pid_of, title = PARTS[part]
        before, freed = marks_of(title, run), locks_freed(run)
        for count in (1, 2):  # what is lost the second time is not what was lost the first time
            kill_in_the_middle_of_an_answer(pid_of(run))
            wait_for_mark(title, run, before + count)
            groups.wait_for(2, since=run.status.epoch + 2, run=run)
        assert locks_freed(run) != freed, part
    run.stop()
    assert run.status.state is RunState.STOPPED


def locks_freed(run: TrainingRun) -> list[str]:
    """What the run says of that: how often stands in the same line."""
    return [line for line in run.log_lines if "held a lock" in line]


@pytest.mark.parametrize("delays", WAYS)
@pytest.mark.parametrize("part", PARTS)
def test_where_it_cannot_be_started_anew_the_run_says_what_has_ended_and_can_be_started_again(
    swarm, monkeypatch, part, delays
):
    monkeypatch.setattr(restart_count, "MOST_RESTARTS", 0)
    run = run_of(swarm, options(f"fails-{part}", **ALONE, **delays))
    run.start()
    assert run.wait(epochs=1, timeout=PATIENCE)
    pid_of, title = PARTS[part]
    pid = pid_of(run)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ProcessEndedError, match=title + " " + KILLED.format(pid=pid)):
        assert run.wait(timeout=NOTICED_WITHIN), "not noticed in time"
    assert run.status.state is RunState.FAILED
    assert multiprocessing.active_children() == ([] if part in ("daemon", "dht") else [swarm.dht])
    monkeypatch.undo()
    peer_id, epoch = swarm.peer_id, run.status.epoch
    run.start()
    assert run.wait(epochs=2, timeout=PATIENCE)
    assert run.status.epoch >= epoch + 2, "it goes on from there"
    assert swarm.dht.peer_id.to_base58() == peer_id
    run.stop()


def test_what_ends_while_the_run_is_paused_is_started_anew_when_it_goes_on(swarm, eventually):
    run = run_of(swarm, options("paused", **ALONE))
    run.start()
    run.wait(epochs=1, timeout=PATIENCE)
    run.pause()
    run.wait_for(RunState.PAUSED, PATIENCE)
    pid = swarm.dht.pid
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: swarm.dht.pid not in (pid, None))
    assert run.status.state is RunState.PAUSED
    run.resume()
    assert run.wait(epochs=2, timeout=PATIENCE)
    run.apply(target_batch_size=64, matchmaking_time=1.0)
    assert run.wait(epochs=2, timeout=PATIENCE)
    run.stop()
