"""A peer as a process of its own, in which a plain Trainer trains with the strategy. Not a test."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from lightning import Callback
from tiny import LOOPBACK, TinyModel, loader, parameters, samples, trainer
from torch import Tensor
from torch.utils.data import DataLoader

from hivenb.strategy import HivemindStrategy

#: Seconds after which a peer gives up waiting for the others.
PATIENCE = 90.0


def deadline() -> float:
    return time.monotonic() + PATIENCE


class WaitForPeers(Callback):
    """Begins to train only when so many peers see each other."""

    def __init__(self, count: int):
        self._count = count

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step > 0:
            return
        # not in on_train_start: the strategy puts this peer on the list only after that of the callbacks
        tracker, end = trainer.strategy.optimizer.tracker, deadline()
        while trainer.strategy.num_peers < self._count:
            if time.monotonic() > end:
                raise TimeoutError(
                    f"saw {trainer.strategy.num_peers} of {self._count} peers: {tracker.global_progress}"
                )
            time.sleep(0.02)


class Reports(Callback):
    """Keeps the reports of all epochs, with the parameters at their end."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.reports: list[Any] = []
        self.parameters: list[list[Tensor]] = []

        def keep(report: Any) -> None:
            self.reports.append(report)
            self.parameters.append(parameters(pl_module))

        trainer.strategy.on_epoch = keep


class StopAt(Callback):
    """Ends training after so many epochs of the swarm."""

    def __init__(self, epoch: int):
        self._epoch = epoch

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.strategy.hivemind_epoch >= self._epoch:
            trainer.should_stop = True


class Slow(Callback):
    """Makes each batch take a while, as batches do."""

    def __init__(self, seconds: float):
        self._seconds = seconds

    def on_train_batch_start(self, *args: Any) -> None:
        time.sleep(self._seconds)


def train(connection: Any, number: int, peers: int, initial_peers: Sequence[str], settings: dict[str, Any]) -> None:
    """Train until so many epochs of the swarm are over, and send what came out.

    :param settings: ``epochs``, ``target``, ``share`` (of one fixed batch, its first and last row; ``None`` for a
      shuffle of the peer's own), ``model`` and ``strategy`` (keyword arguments)
    """
    torch.set_num_threads(1)
    torch.manual_seed(number)
    logging.getLogger("lightning").setLevel(logging.ERROR)
    model = TinyModel(**settings["model"])
    strategy = HivemindStrategy(
        settings["target"],
        initial_peers=list(initial_peers) or None,
        **{"matchmaking_time": 3.0, "averaging_timeout": 30.0, **LOOPBACK, **settings["strategy"]},
    )
    reports = Reports()
    callbacks = [reports, WaitForPeers(peers), StopAt(settings["epochs"]), Slow(0.05)]
    connection.send(("addresses", [str(a) for a in strategy.dht.get_visible_maddrs()]))
    data = loader(256, 8, seed=number, shuffle=True) if settings["share"] is None else fixed_batch(*settings["share"])
    trainer(strategy, max_epochs=-1, callbacks=callbacks).fit(model, data)
    connection.send(("reports", reports.reports))
    # as arrays: shared memory would need this process to live on
    history = [[tensor.numpy() for tensor in one] for one in reports.parameters]
    connection.send(("parameters", (history, [tensor.numpy() for tensor in parameters(model)])))
    connection.send(("epoch", strategy.hivemind_epoch))
    connection.close()


def fixed_batch(start: int, end: int) -> DataLoader[Any]:
    """These rows of one fixed batch of 16, as the only batch there is."""
    x, y = samples(16)
    return DataLoader([(x[start:end], y[start:end])], batch_size=None)
