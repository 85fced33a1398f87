"""One peer whose target is its batch, against plain torch: optimizers and schedulers, each in three modes.

The cases of a test, and of the table that ``benchmarks/optimizers_and_schedulers.py`` prints.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning import Callback
from tiny import DELAYS, TinyModel, loader, own_run, parameters, trainer
from torch import nn, optim
from torch.optim import lr_scheduler as schedules

import hivenb
from hivenb.engine.averaging.torch_optimizer_state import group_settings
from hivenb.strategy import HivemindStrategy

#: Samples in a batch, and in a swarm epoch; batches in an epoch of the data, and such epochs.
BATCH, BATCHES, EPOCHS = 16, 4, 3
STEPS = BATCHES * EPOCHS

#: Seconds within which a step in the background has to begin.
PATIENCE = 60.0

MODES: Mapping[str, dict[str, Any]] = {
    "synchronous": {},
    "offloaded": {"offload_optimizer": True},
    "delayed": {**DELAYS, "delay_compensation": False},
    "compensated": DELAYS,
}

Make = Callable[[Any], Any]


@dataclass(frozen=True)
class Case:
    """What is trained with.

    :param optimizer: makes one of parameter groups
    :param scheduler: makes one of the optimizer, if there is to be one
    """

    optimizer: Make
    scheduler: Make | None = None


def _optimizer(name: str, **kwargs: Any) -> Make:
    return lambda groups: getattr(optim, name)(groups, lr=0.02, **kwargs)


_momentum = _optimizer("SGD", momentum=0.9)

OPTIMIZERS: Mapping[str, Case] = {
    name: Case(_optimizer(name, **kwargs))
    for name, kwargs in {
        "SGD": {"momentum": 0.9, "nesterov": True},
        "Adam": {"amsgrad": True},
        "AdamW": {"weight_decay": 0.1},
        "NAdam": {},
        "RAdam": {},
        "Adamax": {},
        "Adagrad": {"lr_decay": 0.1},
        "Adadelta": {"eps": 0.1},
        "RMSprop": {"centered": True, "momentum": 0.9},
        "Rprop": {},
        "ASGD": {"t0": 2.0},
        "Adafactor": {},
    }.items()
    if hasattr(optim, name)  # torch has some of them since lately
}


def _in_a_row(optimizer: optim.Optimizer) -> Any:
    parts = [schedules.LinearLR(optimizer, 0.1, total_iters=4), schedules.CosineAnnealingLR(optimizer, STEPS)]
    return schedules.SequentialLR(optimizer, parts, milestones=[4])


def _all_at_once(optimizer: optim.Optimizer) -> Any:
    parts = [schedules.ConstantLR(optimizer, 0.5, total_iters=5), schedules.ExponentialLR(optimizer, 0.9)]
    return schedules.ChainedScheduler(parts)


SCHEDULERS: Mapping[str, Case] = {
    "StepLR": Case(_momentum, partial(schedules.StepLR, step_size=3, gamma=0.5)),
    "ExponentialLR": Case(_momentum, partial(schedules.ExponentialLR, gamma=0.8)),
    "LambdaLR, one function for each group": Case(
        _momentum, partial(schedules.LambdaLR, lr_lambda=[lambda epoch: 1 / (1 + epoch), lambda epoch: 0.9**epoch])
    ),
    "CosineAnnealingWarmRestarts": Case(_momentum, partial(schedules.CosineAnnealingWarmRestarts, T_0=5)),
    "CyclicLR, with momentum": Case(_momentum, partial(schedules.CyclicLR, base_lr=0.005, max_lr=0.05, step_size_up=4)),
    "OneCycleLR, with betas": Case(
        _optimizer("AdamW"), partial(schedules.OneCycleLR, max_lr=[0.05, 0.01], total_steps=STEPS + 1)
    ),
    "SequentialLR of LinearLR and CosineAnnealingLR": Case(_momentum, _in_a_row),
    "ChainedScheduler of ConstantLR and ExponentialLR": Case(_momentum, _all_at_once),
}

CASES: Mapping[str, Case] = {**OPTIMIZERS, **SCHEDULERS}


class TwoGroups(TinyModel):
    """Two layers, each with its own rate, and an optimizer and a scheduler of a case."""

    def __init__(self, case: Case):
        super().__init__()
        self.layer: Any = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self._case = case

    def configure_optimizers(self) -> Any:
        first, second = self.layer
        optimizer = self._case.optimizer(
            [{"params": list(first.parameters())}, {"params": list(second.parameters()), "lr": 0.05}]
        )
        return optimizer if self._case.scheduler is None else ([optimizer], [self._case.scheduler(optimizer)])


class OneStepLate(Callback):
    """Lets each step in the background begin when the gradients of the next batch have been computed.

    So that they always are of the parameters before that step, however fast the machine is.
    """

    def __init__(self) -> None:
        self._go = threading.Semaphore(0)
        self._batches = 0

    def on_train_start(self, trainer: Any, *args: Any) -> None:
        trainer.strategy.optimizer.opt.register_step_pre_hook(self._wait)

    def _wait(self, *args: Any) -> None:
        assert self._go.acquire(timeout=PATIENCE)

    def on_after_backward(self, *args: Any) -> None:
        self._batches += 1
        if self._batches > 1:
            self._go.release()

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        # the strategy waits for the last step before it says that the pass is over
        if trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs:
            self._go.release()


@dataclass(frozen=True)
class Trained:
    """What a training has come to.

    :param parameters: of the model
    :param settings: of each group of the optimizer: rate, momentum and so on
    """

    parameters: list[torch.Tensor]
    settings: list[dict[str, Any]]


def untrained(case: Case) -> Trained:
    """As it begins."""
    return Trained(parameters(TwoGroups(case)), [])


def in_a_swarm(case: Case, mode: str, swarm: hivenb.Swarm) -> Trained:
    """Trained by the strategy, in a run that nobody else is in."""
    model = TwoGroups(case)
    own = {"matchmaking_time": 0.5, "averaging_timeout": 20.0, **own_run(), **MODES[mode]}
    strategy = HivemindStrategy(BATCH, dht=swarm.dht, **own)
    late = [OneStepLate()] if mode == "delayed" else []
    trainer(strategy, max_epochs=EPOCHS, callbacks=late).fit(model, loader(BATCHES * BATCH, BATCH))
    assert strategy.hivemind_epoch == STEPS
    assert strategy.optimizer is not None
    return Trained(parameters(model), group_settings(strategy.optimizer.opt))


def by_torch(case: Case, mode: str) -> Trained:
    """Trained by a loop; where steps are delayed, with gradients of the parameters before the last step."""
    model = TwoGroups(case)
    made = model.configure_optimizers()
    optimizer, scheduler = (made, None) if case.scheduler is None else (made[0][0], made[1][0])
    seen = model
    for _ in range(EPOCHS):
        for batch in loader(BATCHES * BATCH, BATCH):
            gradients = torch.autograd.grad(seen.training_step(batch, 0), list(seen.parameters()))
            if mode == "delayed":
                seen = copy.deepcopy(model)
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
    return Trained(parameters(model), group_settings(optimizer))


def difference(one: Trained, other: Trained) -> float:
    """The largest between two parameters."""
    pairs = zip(one.parameters, other.parameters, strict=True)
    return max(float((mine - theirs).abs().max()) for mine, theirs in pairs)
