"""An interrupt at any moment while local peers are started, or leave, leaves none behind."""

from __future__ import annotations

import multiprocessing as mp
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, cast

import pytest
from interrupts import interruptible_thread

from hivenb.options.options import Options
from hivenb.peers import local_peers as module
from hivenb.peers.followed_run import FollowedRun, Followers
from hivenb.peers.local_peer import LocalPeer
from hivenb.peers.local_peers import LocalPeers

pytestmark = pytest.mark.process


@pytest.fixture
def interrupt() -> Iterator[Callable[[], None]]:
    """Interrupts the test, as the button of a notebook does."""
    with interruptible_thread() as given:
        yield given


class Forked:
    """Processes in the place of peers: they say that they are ready, and do not leave when they are told to."""

    def __init__(self) -> None:
        self.processes: list[BaseProcess] = []
        #: called when one has been forked, of which nobody knows yet
        self.then: Callable[[], None] = lambda: None

    def fork_peer(self, *args: Any) -> tuple[BaseProcess, Connection]:
        ours, theirs = mp.Pipe()
        process = mp.get_context("spawn").Process(target=time.sleep, args=(600,))
        process.start()
        self.processes.append(process)
        theirs.send(("ready", f"peer-{len(self.processes)}"))
        self.then()
        return process, ours

    @property
    def alive(self) -> list[BaseProcess]:
        return [process for process in self.processes if process.is_alive()]


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Forked]:
    made = Forked()
    monkeypatch.setattr(module, "fork_peer", made.fork_peer)
    monkeypatch.setattr(module, "wait_for_server", lambda: None)
    monkeypatch.setattr(module, "make_recipe", lambda *args, **kwargs: b"")
    yield made
    for process in made.processes:
        process.kill()
        process.join()


@pytest.fixture
def peers(forked: Forked) -> Iterator[LocalPeers]:
    made = LocalPeers(tuple)
    yield made
    for process in forked.processes:  # which would not leave otherwise
        process.kill()
    made.close()


class RunStandIn:
    """What is asked of a run for local peers that are never trained."""

    def __init__(self) -> None:
        self.followers, self.options = Followers(), Options(target_batch_size=1)

    def take_name(self) -> None:
        pass


def add(peers: LocalPeers, count: int, **kwargs: Any) -> tuple[LocalPeer, ...]:
    return peers.add(count, cast(FollowedRun, RunStandIn()), **kwargs)


def interrupting_first(method: Callable[..., Any], interrupt: Callable[[], None]) -> Callable[..., Any]:
    def interrupted(*args: Any) -> Any:
        interrupt()
        return method(*args)

    return interrupted


def test_one_that_was_just_forked_is_ended(peers: LocalPeers, forked: Forked, interrupt: Callable[[], None]) -> None:
    forked.then = interrupt
    with pytest.raises(KeyboardInterrupt):
        add(peers, 2)
    assert len(forked.processes) == 1
    assert forked.alive == []


def test_those_that_are_waited_for_are_ended_and_be_it_that_somebody_interrupts_twice(
    peers: LocalPeers, forked: Forked, interrupt: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in ("wait_until_started", "ask_to_leave", "wait_until_gone"):
        monkeypatch.setattr(LocalPeer, step, interrupting_first(getattr(LocalPeer, step), interrupt))
    with pytest.raises(KeyboardInterrupt):
        add(peers, 2)
    assert len(forked.processes) == 2
    assert forked.alive == []


def test_those_that_have_just_started_are_there_as_a_whole_or_not_at_all(
    peers: LocalPeers, forked: Forked, interrupt: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_take_in", interrupting_first(peers._take_in, interrupt))
    with pytest.raises(KeyboardInterrupt):
        add(peers, 2, restart=True)
    assert peers.all == ()
    assert len(forked.processes) == 2
    assert forked.alive == []


@pytest.mark.parametrize("step", ["ask_to_leave", "wait_until_gone"])
def test_those_that_are_to_leave_are_ended_at_once(
    peers: LocalPeers, forked: Forked, interrupt: Callable[[], None], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    stays, *_ = add(peers, 3)
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(LocalPeer, step, interrupting_first(getattr(LocalPeer, step), interrupt))
        with pytest.raises(KeyboardInterrupt):
            peers.remove(2)
    assert peers.all == (stays,)
    assert [process.pid for process in forked.alive] == [stays.pid]
