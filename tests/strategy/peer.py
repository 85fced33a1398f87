"""A peer as a process of its own, in which a plain Trainer trains with the strategy. Not a test."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny import LOOPBACK, TinyModel, loader, parameters, samples, trainer
from torch import nn
from torch.utils.data import DataLoader

from hivenb.engine.network.dht import DHT
from hivenb.engine.optimizer.scheduled_rounds import EpochReport
from hivenb.strategy import HivemindStrategy

#: Seconds after which a peer gives up waiting for the others, or for its next order.
PATIENCE = 90.0


@dataclass(frozen=True)
class Moment:
    """A peer as it was when an epoch had ended (``report``), or when it began to train (no report).

    Arrays instead of tensors: to be shared, those would need the process they come from to live on.
    """

    stage: int
    epoch: int
    report: EpochReport | None
    rate: float
    parameters: list[np.ndarray]
    statistics: list[dict[str, np.ndarray]]
    buffers: dict[str, np.ndarray] = field(default_factory=dict)


class Reporter(Callback):
    """Sends each :class:`Moment` as it comes, and obeys what is sent back: ``pause``, ``go``, ``stop``."""

    def __init__(self, connection: Any, stage: int):
        self._connection, self._stage = connection, stage

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        def send(report: EpochReport | None) -> None:
            optimizer = trainer.strategy.optimizer
            moment = Moment(
                self._stage,
                trainer.strategy.hivemind_epoch,
                report,
                optimizer.opt.param_groups[0]["lr"],
                arrays(pl_module),
                [{k: _array(v) for k, v in state.items()} for state in optimizer.opt.state_dict()["state"].values()],
                {name: _array(buffer) for name, buffer in pl_module.named_buffers()},
            )
            self._connection.send(("moment", moment))

        trainer.strategy.on_epoch = send
        send(None)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        while self._connection.poll():
            order = self._connection.recv()
            if order == "pause":
                assert self._connection.poll(PATIENCE), "paused for good"
            elif order == "stop":
                trainer.should_stop = True


class WideModel(TinyModel):
    """With a matrix that is large enough to be cut into parts when it is averaged, and to be worth a low rank."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.layer = nn.Sequential(nn.Linear(4, 512), nn.Linear(512, 300), nn.Linear(300, 2))


class Shift(nn.Module):
    """Moves its inputs: what a peer's data are like.

    :param by: in each dimension
    """

    def __init__(self, by: float):
        super().__init__()
        self.by = by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.by


class NormModel(TinyModel):
    """With a BatchNorm, on data that are moved.

    :param shift: by so much
    :param momentum: by which it moves on with each batch
    """

    def __init__(self, shift: float = 0.0, momentum: float = 0.1, **kwargs: Any):
        super().__init__(**kwargs)
        self.layer = nn.Sequential(Shift(shift), nn.BatchNorm1d(4, momentum=momentum), self.layer)


class WaitForPeers(Callback):
    """Begins to train only when so many peers see each other."""

    def __init__(self, count: int):
        self._count = count
        self._waited = False

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        # not in on_train_start: the strategy puts this peer on the list only after that of the callbacks
        tracker, end = trainer.strategy.optimizer.tracker, time.monotonic() + PATIENCE
        while not self._waited and trainer.strategy.num_peers < self._count:
            if time.monotonic() > end:
                raise TimeoutError(
                    f"saw {trainer.strategy.num_peers} of {self._count} peers: {tracker.global_progress}"
                )
            time.sleep(0.02)
        self._waited = True


class StopAt(Callback):
    """Ends training after so many swarm epochs."""

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


def train(connection: Any, number: int, initial_peers: Sequence[str], stages: Sequence[dict[str, Any]]) -> None:
    """Train, and send what comes out as it does.

    :param number: of this peer; seeds its data
    :param stages: settings of each training. One uses the DHT of its strategy; several, one after the other, share
      one. ``peers`` to wait for; ``epochs`` of the swarm after which to end (``None``: when told to); ``target``
      batch size; ``share`` (of one fixed batch, its first and last row; ``None`` for a shuffle of the peer's own);
      ``module`` (a class like :class:`TinyModel`), ``model``, ``strategy`` and ``trainer`` (keyword arguments);
      ``threaded`` (not on the main thread); ``save`` and ``resume`` (paths of checkpoints)
    """
    torch.set_num_threads(1)
    torch.manual_seed(number)
    logging.getLogger("lightning").setLevel(logging.ERROR)
    dht = DHT(initial_peers=initial_peers, start=True, **LOOPBACK) if len(stages) > 1 else None
    try:
        for stage, settings in enumerate(stages):
            own = {"dht": dht} if dht else {"initial_peers": list(initial_peers) or None, **LOOPBACK}
            strategy = HivemindStrategy(
                settings["target"],
                **{"matchmaking_time": 3.0, "averaging_timeout": 30.0, **own, **settings["strategy"]},
            )
            model = settings["module"](**settings["model"])
            if stage == 0:
                connection.send(("addresses", [str(a) for a in strategy.dht.get_visible_maddrs()]))
            with ThreadPoolExecutor(1) as elsewhere:
                fit = partial(_fit, strategy, model, number, settings, Reporter(connection, stage))
                elsewhere.submit(fit).result() if settings["threaded"] else fit()
            connection.send(("end", (strategy.hivemind_epoch, arrays(model))))
    finally:
        if dht is not None:
            dht.shutdown()
    connection.close()


def _fit(strategy: HivemindStrategy, model: TinyModel, number: int, settings: dict[str, Any], reporter: Any) -> None:
    # the reporter after StopAt: its order to pause counts when the epoch is over
    callbacks: list[Callback] = [WaitForPeers(settings["peers"]), Slow(0.05), reporter]
    if settings["epochs"] is not None:
        callbacks.append(StopAt(settings["epochs"]))
    if settings["save"] is not None:
        folder, _, name = str(settings["save"]).rpartition("/")
        callbacks.append(ModelCheckpoint(folder, name, enable_version_counter=False))
    data = loader(256, 8, seed=number, shuffle=True) if settings["share"] is None else fixed_batch(*settings["share"])
    flags = {"enable_checkpointing": settings["save"] is not None, **settings["trainer"]}
    trainer(strategy, max_epochs=-1, callbacks=callbacks, **flags).fit(model, data, ckpt_path=settings["resume"])


def arrays(module: nn.Module) -> list[np.ndarray]:
    """Parameters as they are now; numpy has no bfloat16."""
    return [_array(p.float() if p.dtype is torch.bfloat16 else p) for p in parameters(module)]


def _array(value: Any) -> np.ndarray:
    """A copy in main memory; a step count of an optimizer may be a number."""
    return np.array(value.cpu() if isinstance(value, torch.Tensor) else value)


def fixed_batch(start: int, end: int) -> DataLoader[Any]:
    """These rows of one fixed batch of 16, as the only batch there is."""
    x, y = samples(16)
    return DataLoader([(x[start:end], y[start:end])], batch_size=None)
