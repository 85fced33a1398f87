"""Learning rate schedulers that move with the epochs of the swarm, so that all peers have the same rate."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hivenb.engine.epoch_schedulers import EpochSchedulers

logger = logging.getLogger(__name__)


class HiveMindScheduler:
    """What Lightning sees of a scheduler that the swarm's epochs move: its state and rate, but no step of its own.

    :param scheduler: the scheduler that hivemind steps
    """

    def __init__(self, scheduler: Any):
        self.scheduler = scheduler

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer whose rate it sets."""
        return self.scheduler.optimizer

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: hivemind steps the scheduler once in each epoch of the swarm."""

    def get_last_lr(self) -> list[float]:
        """Learning rate of each parameter group."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state_dict)


def schedulers_for_hivemind(
    optimizer: torch.optim.Optimizer,
    configured: Sequence[Any],
    scheduler_fn: Any,
    offloaded: bool,
) -> EpochSchedulers | Callable[[torch.optim.Optimizer], EpochSchedulers] | None:
    """What to give to ``hivemind.Optimizer`` as its scheduler.

    :param optimizer: the one that ``configure_optimizers`` made
    :param configured: Lightning's configurations of the schedulers that it made
    :param scheduler_fn: as given to :class:`hivenb.HivemindStrategy`
    :param offloaded: whether hivemind makes the optimizer anew
    :raises MisconfigurationException: if the schedulers belong to another optimizer, or do not follow epochs
    """
    if scheduler_fn is not None:
        if configured:
            logger.warning("scheduler_fn replaces the scheduler that configure_optimizers returned")
        if not isinstance(scheduler_fn, (LRScheduler, ReduceLROnPlateau)):
            return lambda made: EpochSchedulers([(_follows_epochs(scheduler_fn(made)), 1)])
        pairs = [(scheduler_fn, 1)]
    else:
        pairs = [(config.scheduler, config.frequency) for config in configured]
    if not pairs:
        return None
    if offloaded:
        raise MisconfigurationException(
            "with offload_optimizer=True the optimizer that the scheduler belongs to is created anew; give "
            "HivemindStrategy(scheduler_fn=...) a function that makes a scheduler for it, for example "
            "scheduler_fn=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.99)"
        )
    for scheduler, _ in pairs:
        if scheduler.optimizer is not optimizer:
            raise MisconfigurationException(
                f"the scheduler {type(scheduler).__name__} belongs to another optimizer than the one that "
                "configure_optimizers returned; make it from that one"
            )
    return EpochSchedulers((_follows_epochs(scheduler), frequency) for scheduler, frequency in pairs)


def _follows_epochs(scheduler: Any) -> Any:
    if isinstance(scheduler, ReduceLROnPlateau):
        raise MisconfigurationException(
            "ReduceLROnPlateau follows a metric that each peer measures for itself, so their learning rates would "
            "drift apart, and a newcomer would begin with the first one. Use a scheduler that follows the epochs of "
            "the swarm, such as CosineAnnealingLR or ExponentialLR"
        )
    return scheduler
