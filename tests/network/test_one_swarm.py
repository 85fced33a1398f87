"""Eight peers that start in the same second with the address of one that is there are one DHT and one run, every time.

So they are when the first one trains, and decides for all, and when it only stands there: of those who come, none is
first then, and they have to agree on who decides.
"""

from __future__ import annotations

import multiprocessing as mp
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import forked
import pytest
import tiny
import torch
from torch import Tensor

import hivenb
from hivenb.errors import SwarmError
from network.internet import Internet, why_not
from network.line import Line

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(400)]

#: Peers that start in the same second; fewer in the short test, as each of them is five processes.
COUNT, FEW = 8, 3

#: Times that they do, in the long test.
OFTEN = 50

#: Samples in an epoch, of the first peer; each other one would have some more. An epoch takes some seconds.
TARGET = 512

#: Seconds within which all have met, on a busy machine with two cores for forty processes.
PATIENCE = 150.0

#: A hundred milliseconds there and back, as between continents.
AFAR = Line(delay=0.025, jitter=0.005, up=5e7, down=5e7)


class SlowModel(tiny.TinyModel):
    """Nine of them leave two cores to the network."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(0.25)
        return super().training_step(batch, batch_idx)


@pytest.fixture(scope="module", autouse=True)
def allowed() -> None:
    if reason := why_not():
        pytest.skip(reason)


@dataclass(frozen=True)
class Told:
    """By a peer, of itself.

    :param peer_id: its id
    :param invite: to its swarm
    :param records: ids of the peers whose reports it finds in the DHT
    :param listed: ids of those that it believes to be there
    :param target: samples in an epoch, as it trains with
    :param is_host: whether it decides on them for all
    :param sizes: of the groups in which it averaged, by epochs
    :param error: what has ended its run
    """

    peer_id: str
    invite: str
    records: frozenset[str] = frozenset()
    listed: frozenset[str] = frozenset()
    target: int = 0
    is_host: bool = False
    sizes: tuple[tuple[int, int], ...] = ()
    error: str = ""


def train(
    enter: Callable[[], None], told: Connection, invite: str | None, target: int, is_training: bool = True
) -> None:
    """A peer on a host, which tells now and then how it does, until it is told to end.

    :param invite: by which it joins once it is told to; the first peer opens a swarm instead
    """
    enter()
    torch.set_num_threads(1)
    if invite is not None:
        told.send("ready")
        told.recv()
    with hivenb.Swarm(public=True) if invite is None else hivenb.Swarm.join(invite) as swarm:
        run = hivenb.TrainingRun(
            SlowModel(),
            tiny.loader(4096),
            swarm=swarm,
            options=hivenb.Options(target_batch_size=target, matchmaking_time=3.0),
            accelerator="cpu",
        )
        if is_training:
            run.start()
        while not told.poll(1.0):
            told.send(_told(swarm, run) if is_training else Told(swarm.peer_id, swarm.invite))
        run.stop()


def _told(swarm: hivenb.Swarm, run: hivenb.TrainingRun) -> Told:
    sizes = run.history.snapshot().series.get("group_size")
    found: tuple[Any, ...] = ()
    with suppress(SwarmError):  # it is too busy to answer
        found = swarm.peers()
    return Told(
        peer_id=swarm.peer_id,
        invite=swarm.invite,
        records=frozenset(one.peer_id for one in found),
        listed=frozenset(one.peer_id for one in run.peers()),
        target=run.options.target_batch_size,
        is_host=run.is_active and run.status.epoch > 0 and run.not_host_reason is None,
        sizes=()
        if sizes is None
        else tuple(zip(sizes.epochs.tolist(), sizes.values.astype(int).tolist(), strict=True)),
        error=repr(run.exception) if run.exception else "",
    )


class Peers:
    """Those of one internet, the first one on its first host, as they last told of themselves."""

    def __init__(self, internet: Internet):
        self._internet = internet
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._told: list[Told | None] = []

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for connection in self._connections:  # all at once, and each in its time
            with suppress(OSError):
                connection.send("end")
        for process in self._processes:
            process.join(30)
            process.kill()
            process.join()

    def start(self, invite: str | None, is_training: bool = True) -> None:
        """One more, on the next host; one that has an invite waits until it is told to join."""
        here, there = mp.Pipe()
        host = len(self._connections)
        enter = self._internet.enter_as(host)
        self._processes.append(forked.start(train, enter, there, invite, TARGET + host, is_training))
        there.close()
        self._connections.append(here)
        self._told.append(None)

    def join_at_once(self) -> None:
        """All but the first, within the same moment."""
        for connection in self._connections[1:]:
            assert connection.poll(PATIENCE), "a peer does not start"
            assert connection.recv() == "ready"
        for connection in self._connections[1:]:
            connection.send("join")

    def first(self) -> Told:
        """What the first one says."""
        assert self._connections[0].poll(PATIENCE), "the first peer does not start"
        told: Told = self._connections[0].recv()
        return told

    def wait_until(self, condition: Callable[[Sequence[Told]], bool]) -> Sequence[Told]:
        """What all say of themselves as soon as that is so."""
        end = time.monotonic() + PATIENCE
        while True:
            for one, connection in enumerate(self._connections):
                while connection.poll():
                    self._told[one] = connection.recv()
            known = [told for told in self._told if told is not None]
            assert not any(told.error for told in known), known
            if len(known) == len(self._told) and condition(known):
                return known
            assert time.monotonic() < end, "\n".join(map(str, self._told))
            time.sleep(0.1)


def are_one(told: Sequence[Told]) -> bool:
    """Whether these are the peers of one run in one DHT, and average with others."""
    everybody = {one.peer_id for one in told}
    return (
        all(one.records == everybody == one.listed for one in told)
        and len({one.target for one in told}) == 1
        and sum(one.is_host for one in told) == 1
        and all(any(size > 1 for _, size in one.sizes) for one in told)
    )


def start_and_meet(is_first_training: bool, count: int = COUNT, seed: int = 0) -> None:
    with Internet([AFAR] * (1 + count), seed) as internet, Peers(internet) as peers:
        peers.start(None, is_first_training)
        first = peers.first()
        for _ in range(count):
            peers.start(first.invite)
        peers.join_at_once()
        began = time.monotonic()
        told = peers.wait_until(lambda told: are_one([one for one in told if one.target]))
        took = time.monotonic() - began
        training = [one for one in told if one.target]
        assert len(training) == count + is_first_training
        if is_first_training:
            assert training[0].is_host, "who was there first decides"
            assert training[0].target == TARGET
        # whether all of them meet in a round of a few seconds, too, depends on what else the machine does
        sizes = [size for one in training for _, size in one.sizes]
        print(f"one swarm of {len(training)} after {took:.1f} s, in rounds of {sizes}")


@pytest.mark.parametrize("is_first_training", [True, False], ids=["first trains", "first stands there"])
def test_peers_that_start_in_the_same_second_are_one_swarm(is_first_training: bool) -> None:
    start_and_meet(is_first_training, count=FEW)


@pytest.mark.long
@pytest.mark.parametrize("time_of_fifty", range(OFTEN))
def test_so_they_are_every_time(time_of_fifty: int) -> None:
    start_and_meet(is_first_training=time_of_fifty % 2 == 0, seed=time_of_fifty)
