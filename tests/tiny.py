"""A model and data so small that what is around them is what is tested. Importable by processes that tests start."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

#: Of a Trainer that writes and prints nothing.
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}

#: Of a DHT, or a strategy with one of its own, that nobody but this machine can reach.
LOOPBACK: dict[str, Any] = {"host_maddrs": ["/ip4/127.0.0.1/tcp/0"], "nat_port_map": False, "auto_nat": False}

#: Everything in the background.
DELAYS: dict[str, Any] = {
    "offload_optimizer": True,
    "delay_state_averaging": True,
    "delay_optimizer_step": True,
    "delay_grad_averaging": True,
}

#: Ways to train, as options: one for each way in which the engine takes a batch.
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "reused": {"reuse_grad_buffers": True},
    "offloaded": {"offload_optimizer": True},
    "all delays": DELAYS,
    "local updates": {"use_local_updates": True},
}

_runs = itertools.count(1)


def own_run() -> dict[str, Any]:
    """Of a strategy whose run nobody else is in, in a swarm that several tests share."""
    return {"run_id": f"run-{next(_runs)}"}


class TinyModel(LightningModule):
    """Linear regression in four dimensions, from the same start each time.

    :param optimizer: makes the optimizer from the parameters
    :param scheduler: makes a scheduler from it, if there is to be one
    """

    def __init__(
        self,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        scheduler: Callable[..., Any] | None = None,
        **optimizer_kwargs: Any,
    ):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self._optimizer, self._scheduler = optimizer, scheduler
        self._optimizer_kwargs = {"lr": 0.05, **optimizer_kwargs}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        optimizer = self._optimizer(self.parameters(), **self._optimizer_kwargs)
        return optimizer if self._scheduler is None else ([optimizer], [self._scheduler(optimizer)])


class PacedModel(TinyModel):
    """One whose batches take a while, so that epochs last about as long as they do for people."""

    #: seconds that a batch takes
    pace = 0.02

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(self.pace)
        return super().training_step(batch, batch_idx)


#: Of those who train while they wait for each other: samples in a batch of :func:`large_batches`.
LARGE_BATCH = 32


def in_large_batches(model: PacedModel) -> PacedModel:
    """One that takes as many samples in a second, for a quarter of the CPU, from :func:`large_batches`."""
    model.pace = LARGE_BATCH / 8 * PacedModel.pace
    return model


def large_batches(shuffle: bool = False) -> DataLoader[Any]:
    """Samples for a model that waits for others while it trains."""
    return loader(4096, LARGE_BATCH, shuffle=shuffle)


def samples(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and targets with a relation to learn."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator)
    return x, x[:, :2] - x[:, 2:] + 0.1 * torch.randn(count, 2, generator=generator)


def loader(count: int = 64, batch_size: int = 8, seed: int = 0, shuffle: bool = False) -> DataLoader[Any]:
    """Those samples in batches."""
    return DataLoader(TensorDataset(*samples(count, seed)), batch_size=batch_size, shuffle=shuffle)


def train(model: TinyModel, optimizer: Any, epochs: int, **step_kwargs: Any) -> None:
    """Without a Trainer: one batch of eight for each epoch."""
    for epoch in range(epochs):
        x, y = samples(8, seed=epoch)
        optimizer.zero_grad()
        nn.functional.mse_loss(model.layer(x), y).backward()
        optimizer.step(**step_kwargs)


def parameters(module: nn.Module) -> list[Tensor]:
    """Copies of the parameters as they are now."""
    return [parameter.detach().clone() for parameter in module.parameters()]


def trainer(strategy: Any, **kwargs: Any) -> Trainer:
    """A quiet Trainer."""
    return Trainer(strategy=strategy, **{**QUIET, **kwargs})
