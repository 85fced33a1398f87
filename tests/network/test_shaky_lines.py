"""Nobody takes a peer for gone whose line is long, uneven, or silent for two seconds; its rounds are everybody's."""

from __future__ import annotations

import multiprocessing as mp
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import forked
import pytest
import tiny
import torch

import hivenb
from hivenb.engine.optimizer.scheduled_rounds import EpochReport
from hivenb.swarm.members import Presence
from network.internet import Internet, why_not
from network.line import Line

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

#: Seconds within which all meet, and an epoch ends.
PATIENCE = 90.0

#: Seconds of a stall: as on a train, or while a phone changes its cell.
STALL = 2.0

ANN, BOB, FAR = range(3)


@pytest.fixture(scope="module", autouse=True)
def allowed() -> None:
    if reason := why_not():
        pytest.skip(reason)


@dataclass
class Told:
    """By a peer, of what it has seen since it began.

    :param groups: how many have averaged gradients, by epochs
    :param gone: names of those whom it has ever taken for gone
    :param early: epochs whose state was averaged beside the gradients
    """

    groups: dict[int, int] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    early: set[int] = field(default_factory=set)


def train(enter: Callable[[], None], connection: Connection, name: str, invite: str | None) -> None:
    """A peer on a host, which tells its invite, and how it does as often as it is asked, until it is told to end."""
    enter()
    torch.set_num_threads(1)
    begin = partial(hivenb.Swarm, public=True) if invite is None else partial(hivenb.Swarm.join, invite)
    with begin(public_name=name) as swarm:
        connection.send(swarm.invite)
        # epochs of 2.5 s, as three peers of 400 samples a second make them
        options = hivenb.Options(target_batch_size=3000)
        run = hivenb.TrainingRun(tiny.PacedModel(), tiny.loader(4096), swarm=swarm, options=options, accelerator="cpu")
        run.start()
        told, tell = Told(), run.strategy.on_epoch

        def note(report: EpochReport) -> None:
            tell(report)
            if not told.groups:
                note_early(run, told.early)
            told.groups[report.epoch] = report.group_size

        run.strategy.on_epoch = note
        while True:
            told.gone |= {str(one.name) for one in run.members if one.presence is Presence.GONE}
            if connection.poll(0.1):
                if connection.recv() == "end":
                    break
                connection.send(Told(dict(told.groups), set(told.gone), set(told.early)))
        run.stop()


def note_early(run: hivenb.TrainingRun, epochs: set[int]) -> None:
    """Have it noted which epochs had their state averaged before their step."""
    averager = run.strategy.optimizer.state_averager
    take_over = averager._take_over_early

    def noting(control: Any, timeout: float) -> None:
        take_over(control, timeout)
        epochs.add(int(control.epoch) - 1)

    averager._take_over_early = noting


def ask(connection: Connection) -> Told:
    connection.send("how do you do?")
    assert connection.poll(PATIENCE), "the peer tells nothing"
    told: Told = connection.recv()
    return told


def wait_for_groups(connection: Connection, size: int, count: int, after: int = -1) -> Told:
    """Wait until a peer has been in so many rounds of that size, of later epochs than one."""
    end = time.monotonic() + PATIENCE
    while True:
        told = ask(connection)
        if sum(group == size for epoch, group in told.groups.items() if epoch > after) >= count:
            return told
        assert time.monotonic() < end, told
        time.sleep(0.2)


@pytest.fixture(scope="module")
def three(allowed: None) -> Iterator[tuple[Internet, list[Connection]]]:
    """Two peers near each other and one far away, 300 to 400 ms there and back, who have met."""
    far = Line(delay=0.13, jitter=0.05)
    with ExitStack() as ended:
        internet = ended.enter_context(Internet([Line(delay=0.02, jitter=0.005)] * 2 + [far]))
        connections: list[Connection] = []
        invite: Any = None
        for host, name in ((ANN, "Ann"), (BOB, "Bob"), (FAR, "Far")):
            here, there = mp.Pipe()
            process = forked.start(train, internet.enter_as(host), there, name, invite)
            there.close()
            ended.callback(forked.end, here, process)
            connections.append(here)
            assert here.poll(PATIENCE), "the peer does not begin"
            invite = here.recv()
        wait_for_groups(connections[ANN], 3, 2)
        yield internet, connections


def test_a_line_of_300_ms_makes_nobody_a_ghost(three: tuple[Internet, list[Connection]]) -> None:
    _, peers = three
    first = max(ask(peers[ANN]).groups)
    told = wait_for_groups(peers[ANN], 3, 3, after=first)
    later = {epoch: size for epoch, size in told.groups.items() if epoch > first}
    print(later)
    assert set(later.values()) == {3}
    assert [ask(one).gone for one in peers] == [set()] * 3


def test_stalls_of_two_seconds_make_nobody_a_ghost(three: tuple[Internet, list[Connection]]) -> None:
    internet, peers = three
    for _ in range(2):
        internet.change(FAR, is_cut=True)
        time.sleep(STALL)
        internet.change(FAR, is_cut=False)
        stalled = max(ask(peers[ANN]).groups)
        wait_for_groups(peers[ANN], 3, 2, after=stalled)
    told = [ask(one) for one in peers]
    print(told)
    assert [one.gone for one in told] == [set()] * 3


def test_the_state_is_averaged_in_the_round_trip_of_the_gradients(three: tuple[Internet, list[Connection]]) -> None:
    _, peers = three
    first = max(ask(peers[ANN]).groups)
    wait_for_groups(peers[ANN], 3, 3, after=first)
    told = [ask(one) for one in peers]
    print(told)
    assert all(any(epoch > first for epoch in one.early) for one in told)
