"""Peers that train on hosts of their own, and tell how they do."""

from __future__ import annotations

import multiprocessing as mp
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import forked
import tiny
import torch

import hivenb
from hivenb.engine.optimizer.scheduled_rounds import EpochReport
from hivenb.swarm.members import Presence
from network.internet import Internet

#: Seconds within which all meet, and an epoch ends.
PATIENCE = 90.0


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


def train(enter: Callable[[], None], connection: Connection, name: str, invite: str | None, target: int) -> None:
    """A peer on a host, which tells its invite, and how it does as often as it is asked, until it is told to end.

    :param target: samples of all peers in an epoch; one peer has 400 in a second
    """
    enter()
    torch.set_num_threads(1)
    begin = partial(hivenb.Swarm, public=True) if invite is None else partial(hivenb.Swarm.join, invite)
    with begin(public_name=name) as swarm:
        connection.send(swarm.invite)
        options = hivenb.Options(target_batch_size=target)
        model, data = tiny.in_large_batches(tiny.PacedModel()), tiny.large_batches()
        run = hivenb.TrainingRun(model, data, swarm=swarm, options=options, accelerator="cpu")
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


@contextmanager
def training(internet: Internet, names: Sequence[str], target: int) -> Iterator[list[Connection]]:
    """Peers that have met, one on each host; what is asked of them goes through these connections.

    :param target: samples of all peers in an epoch
    """
    with ExitStack() as ended:
        connections: list[Connection] = []
        invite: Any = None
        for host, name in enumerate(names):
            here, there = mp.Pipe()
            process = forked.start(train, internet.enter_as(host), there, name, invite, target)
            there.close()
            ended.callback(forked.end, here, process)
            connections.append(here)
            assert here.poll(PATIENCE), "the peer does not begin"
            invite = here.recv()
        for connection in connections:
            wait_for_groups(connection, len(names), 2)
        yield connections
