"""Handlers that an averager leaves in the daemon: they are not in the way of its successor."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
import torch

from hivenb.engine.averaging.averager import Averager, DaemonLink
from hivenb.engine.averaging.gradient_averager import GradientAverager
from hivenb.engine.process.child import shared_locks_held
from hivenb.errors import ProcessEndedError


@pytest.fixture
def make(dht, run_id):
    made = []

    def make_averager() -> GradientAverager:
        parameters = [torch.zeros(3, requires_grad=True)]
        made.append(GradientAverager(parameters, dht=dht, prefix=run_id, start=True, min_matchmaking_time=2.0))
        return made[-1]

    yield make_averager
    for averager in made:
        if averager.is_alive():
            averager.shutdown()


def kill_unseen(averager):
    """Let nobody look after it, who would free a lock with which it dies: those that all share it does not hold."""
    averager._is_dismissed = True
    with shared_locks_held():
        os.kill(averager.pid, signal.SIGKILL)
        averager.join(10)


def test_one_whose_answer_was_lost_while_it_started_leaves_its_place_to_a_successor(make, monkeypatch):
    wait = Averager.wait_until_ready
    begun = []

    def lose_the_answer(self, timeout=None):
        begun.append(self)
        wait(self, timeout)
        raise ProcessEndedError("another one was killed", "another one")

    monkeypatch.setattr(Averager, "wait_until_ready", lose_the_answer)
    with pytest.raises(ProcessEndedError, match="another one was killed"):
        make()
    monkeypatch.undo()
    assert not begun[0].is_alive()
    assert make().is_alive()


def test_one_that_could_not_say_goodbye_to_the_daemon_leaves_its_place_to_a_successor(make):
    first = make()
    kill_unseen(first)
    first.shutdown()
    assert make().is_alive()


def test_handlers_are_forgotten_also_by_a_thread_that_runs_a_loop(make):
    first = make()
    kill_unseen(first)

    async def forget() -> None:
        first._daemon_link.forget(first._handler_names())

    asyncio.run(forget())
    assert make().is_alive()


def test_a_link_that_was_never_made_forgets_nothing():
    DaemonLink().forget(["anything"])
