"""The number of local peers follows what a person asks for, also while it still changes."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import tiny

from hivenb.options import Options
from hivenb.run.local_peer_count import LocalCount, LocalPeerCount, local_peer_count
from hivenb.training import TrainingRun


class SlowSwarm:
    """Adds a peer each time that the test allows it."""

    def __init__(self):
        self.local_peers = ()
        self.allowed = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.failure = None
        self.state = "training"
        self.has_arrived = threading.Event()  # whoever came by itself
        self.has_arrived.set()

    def add_local_peers(self, count, run, restart):
        self.restart = restart
        self.begun.release()
        assert self.allowed.acquire(timeout=10)
        if self.failure is not None:
            raise self.failure
        new = tuple(SimpleNamespace(state=self.state, number=7, last_words="killed") for _ in range(count))
        self.local_peers += new
        return new

    def start_again_if_dead(self, run, restart):
        self.restart = restart

    def to_come_to(self, run):
        return 0

    def forget_those_to_come(self, run):
        assert self.has_arrived.wait(10)

    @property
    def local(self):
        return self

    def remove_local_peers(self, count, run):
        self.local_peers = self.local_peers[: len(self.local_peers) - count]


class SlowRun:
    def __init__(self):
        self.swarm = SlowSwarm()

    @property
    def local_peers(self):
        return self.swarm.local_peers


@pytest.fixture
def slow():
    return SlowRun()


def workers() -> int:
    return sum(thread.name == "hivenb-local-peers" for thread in threading.enumerate())


def test_what_is_asked_for_last_holds_while_a_person_drags(slow, eventually):
    count = LocalPeerCount(slow)
    assert count.now == LocalCount(0, 0)
    for wanted in (1, 2, 5, 8, 3):
        count.ask_for(wanted)
        assert count.now == LocalCount(0, wanted)
    assert workers() == 1
    slow.swarm.allowed.release()
    eventually(lambda: count.now == LocalCount(1, 3))
    assert count.now.is_changing
    count.ask_for(0)
    slow.swarm.allowed.release()  # the one that is on its way
    eventually(lambda: count.now == LocalCount(0, 0))
    eventually(lambda: workers() == 0)


def test_nobody_who_asks_waits_for_one_that_comes_by_itself(slow, eventually):
    slow.swarm.has_arrived.clear()
    slow.swarm.allowed.release()
    count = LocalPeerCount(slow)
    began = time.monotonic()
    count.ask_for(1)
    assert time.monotonic() - began < 5
    assert count.now == LocalCount(0, 1)
    slow.swarm.has_arrived.set()
    eventually(lambda: count.now == LocalCount(1, 1))


def test_an_error_ends_the_work_and_is_told_until_something_else_is_asked_for(slow, eventually):
    count = LocalPeerCount(slow)
    slow.swarm.failure = RuntimeError("no room")
    count.ask_for(2)
    slow.swarm.allowed.release()
    eventually(lambda: count.now == LocalCount(0, 0, "RuntimeError: no room"))
    slow.swarm.failure = None
    count.ask_for(1)
    assert count.now.error == ""
    slow.swarm.allowed.release()
    eventually(lambda: count.now == LocalCount(1, 1))


def test_those_that_die_are_not_replaced_without_end(slow, eventually):
    count = LocalPeerCount(slow)
    slow.swarm.state = "failed"
    count.ask_for(3)
    slow.swarm.allowed.release(5)
    told = "LocalPeerError: local peer 7 has died, and no more are added: killed"
    eventually(lambda: count.now == LocalCount(0, 0, told))
    assert len(slow.swarm.local_peers) == 1
    slow.swarm.state = "training"
    count.ask_for(1)  # what has died before is no reason to refuse it
    eventually(lambda: count.now == LocalCount(1, 1))


def test_peers_that_have_ended_do_not_count_and_are_removed_on_the_way(slow, eventually):
    ended, alive = SimpleNamespace(state="failed"), SimpleNamespace(state="training")
    slow.swarm.local_peers = (alive, ended, alive, ended)
    count = LocalPeerCount(slow)
    assert count.now == LocalCount(2, 2)
    count.ask_for(1)
    eventually(lambda: count.now == LocalCount(1, 1))
    assert slow.swarm.local_peers == (alive, ended)


def test_two_views_of_a_run_share_one(slow):
    assert local_peer_count(slow) is local_peer_count(slow)
    assert local_peer_count(SlowRun()) is not local_peer_count(slow)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_real_peers_come_and_go_while_a_run_trains(swarm, eventually):
    options = Options(target_batch_size=512, matchmaking_time=2.0)
    model = tiny.in_large_batches(tiny.PacedModel())
    run = TrainingRun(model, tiny.large_batches(), swarm=swarm, options=options, accelerator="cpu")
    count = local_peer_count(run)
    run.start()
    count.ask_for(2)
    eventually(lambda: count.now == LocalCount(2, 2), 120)
    eventually(lambda: len(run.peers()) == 3, 120)
    count.ask_for(1)
    eventually(lambda: count.now == LocalCount(1, 1) and workers() == 0, 120)
    swarm.local_peers[0].kill()
    assert count.now == LocalCount(0, 0)
    run.model.lock = threading.Lock()  # cannot be sent to another process
    count.ask_for(1)
    eventually(lambda: "cannot be sent to another process" in count.now.error, 120)
    run.stop()


def test_those_that_die_are_started_again_if_asked_to(slow, eventually):
    count = LocalPeerCount(slow)
    assert not count.restart
    count.restart = True
    assert slow.swarm.restart, "those that are there already"
    slow.swarm.restart = None
    slow.swarm.allowed.release()
    count.ask_for(1)
    eventually(lambda: not count.now.is_changing)
    assert slow.swarm.restart
