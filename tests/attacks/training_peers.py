"""Real peers that train a tiny model together, each in a process of its own, and one that does not mean it."""

from __future__ import annotations

import itertools
import math
import multiprocessing as mp
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import hivemind
import torch
from hivemind.utils.asyncio import _AsyncContextWrapper
from tiny import LOOPBACK, TinyModel, samples

from hivenb.engine.network.dht import DHT
from hivenb.engine.optimizer.optimizer import Optimizer

#: Of all peers of a run.
_OPTIONS: dict[str, Any] = {
    "run_id": "attacked",
    "target_batch_size": 96,
    "delay_state_averaging": False,
    "matchmaking_time": 2.0,
    "averaging_timeout": 10.0,
}

#: Seconds for which victims go on.
_PATIENCE = 60.0

#: Samples of each batch.
_BATCH_SIZE = 8


@dataclass(frozen=True)
class Victim:
    """What has become of a peer that means it.

    :param loss: of its model in the end, on data that nobody has trained on
    :param is_finite: whether all parameters are
    :param group_sizes: of its rounds
    :param refused: ids of peers whose parts or averages it has refused
    """

    loss: float
    is_finite: bool
    group_sizes: list[int]
    refused: set[str]


@dataclass(frozen=True)
class Attacked:
    """A run that was attacked, as its victims have it in the end."""

    victims: list[Victim]
    attacker: str

    @property
    def worst_loss(self) -> float:
        losses = [victim.loss for victim in self.victims]
        return math.nan if any(map(math.isnan, losses)) else max(losses)

    @property
    def named(self) -> int:
        """Victims that have named the attacker."""
        return sum(self.attacker in victim.refused for victim in self.victims)

    @property
    def innocent(self) -> int:
        """Others that were named."""
        return len(set().union(*(victim.refused for victim in self.victims)) - {self.attacker})

    @property
    def together(self) -> int:
        """Victims that have averaged with others."""
        return sum(max(victim.group_sizes, default=1) > 1 for victim in self.victims)


def attack(
    become_attacker: Callable[[], dict[str, Any]], *, epochs: int = 8, victims: int = 3, **options: Any
) -> Attacked:
    """Let victims train for some epochs in which an attacker takes part.

    :param become_attacker: called in the attacker's process, which changes hivenb there as it likes; gives its own
      arguments of the optimizer
    :param options: of everybody's optimizer
    """
    fork = mp.get_context("fork")  # with what was taken away from this process
    with ExitStack() as ended:
        first = DHT(start=True, **LOOPBACK)
        ended.callback(first.shutdown)
        addresses = [str(address) for address in first.get_visible_maddrs()]
        pipes = []
        for number in range(victims + 1):
            here, there = fork.Pipe()
            own = become_attacker if number == victims else None
            process = fork.Process(target=_train, args=(there, number, victims + 1, addresses, epochs, own, options))
            process.start()
            ended.callback(process.join, 20)
            ended.callback(process.kill)
            pipes.append(here)
        attacker = [_heard(pipe) for pipe in pipes][-1]
        for pipe in pipes:
            pipe.send("begin")
        told = [_heard(pipe) for pipe in pipes[:-1]]
        for pipe in pipes[:-1]:
            pipe.send("end")
        return Attacked(told, attacker)


def _heard(pipe: Connection) -> Any:
    assert pipe.poll(2 * _PATIENCE), "a peer has not answered"
    return pipe.recv()


def _train(
    connection: Connection,
    number: int,
    count: int,
    addresses: Sequence[str],
    epochs: int,
    become_attacker: Callable[[], dict[str, Any]] | None,
    options: dict[str, Any],
) -> None:
    _AsyncContextWrapper.EXECUTOR_LOCK = mp.Lock()
    torch.set_num_threads(1)
    own = become_attacker() if become_attacker is not None else {}
    model = TinyModel()
    dht = DHT(start=True, initial_peers=addresses, **LOOPBACK)
    refused: set[str] = set()
    sizes: list[int] = []

    def note(report: Any) -> None:
        refused.update(report.refused)
        sizes.append(report.group_size)

    optimizer = Optimizer(
        dht=dht, optimizer=torch.optim.SGD(model.parameters(), lr=0.3), on_epoch=note, **{**_OPTIONS, **options, **own}
    )
    connection.send(str(dht.peer_id))
    connection.recv()
    start = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.begin()
    end = time.monotonic() + _PATIENCE
    while optimizer.tracker.global_progress.num_peers < count and time.monotonic() < end:
        time.sleep(0.05)  # epochs are short: the first would be over before the last is there
    batches = (samples(_BATCH_SIZE, seed=1000 * number + seed) for seed in itertools.count())
    if become_attacker is not None:
        while True:
            _take_step(model, optimizer, next(batches))
            if not _is_finite(model):
                with torch.no_grad():  # the attacker is unharmed, and goes on
                    for parameter, before in zip(model.parameters(), start, strict=True):
                        parameter.copy_(before)
    while optimizer.local_epoch < epochs and time.monotonic() < end and _is_finite(model):
        _take_step(model, optimizer, next(batches))
    x, y = samples(256, seed=999)
    loss = torch.nn.functional.mse_loss(model.layer(x), y).item()
    finite = _is_finite(model)
    connection.send(Victim(loss if finite else math.nan, finite, [*sizes], refused))
    while not connection.poll(0.0 if finite else None):  # whoever is slower is not left alone with the attacker
        _take_step(model, optimizer, next(batches))
    optimizer.shutdown()
    dht.shutdown()


def _is_finite(model: TinyModel) -> bool:
    return all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def _take_step(model: TinyModel, optimizer: hivemind.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = batch
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model.layer(x), y).backward()
    time.sleep(0.02)
    optimizer.step(batch_size=_BATCH_SIZE)
