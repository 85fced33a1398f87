"""Learning rate schedulers that move with the epochs of the swarm, so that all peers have the same rate."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hivenb.engine.optimizer.epoch_schedulers import EpochSchedulers

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


MakeSchedulers = Callable[[torch.optim.Optimizer], EpochSchedulers]


def scheduler_maker(scheduler_fn: Any) -> MakeSchedulers:
    """What makes the schedulers of an optimizer out of ``scheduler_fn``.

    :param scheduler_fn: as given to :class:`hivenb.HivemindStrategy`: a function, or a scheduler
    """

    def make(optimizer: torch.optim.Optimizer) -> EpochSchedulers:
        is_made = isinstance(scheduler_fn, (LRScheduler, ReduceLROnPlateau))
        scheduler = _follows_epochs(scheduler_fn if is_made else scheduler_fn(optimizer))
        if scheduler.optimizer is not optimizer:
            raise MisconfigurationException(
                f"the scheduler {type(scheduler).__name__} belongs to another optimizer than the one that is trained "
                "with, which with offload_optimizer=True is made anew; give a function that makes one from an optimizer"
            )
        return EpochSchedulers([(scheduler, 1)])

    return make


def schedulers_for_hivemind(
    configured: Sequence[Any], scheduler_fn: Any, offloaded: bool
) -> EpochSchedulers | MakeSchedulers | None:
    """What to give to ``hivemind.Optimizer`` as its scheduler.

    :param configured: Lightning's configurations of the schedulers that ``configure_optimizers`` made
    :param scheduler_fn: as given to :class:`hivenb.HivemindStrategy`
    :param offloaded: whether hivemind makes the optimizer anew
    :raises MisconfigurationException: if the schedulers do not follow epochs, or belong to another optimizer
    """
    if scheduler_fn is not None:
        if configured:
            logger.warning("scheduler_fn replaces the scheduler that configure_optimizers returned")
        return scheduler_maker(scheduler_fn)
    if not configured:
        return None
    if offloaded:
        raise MisconfigurationException(
            "with offload_optimizer=True the optimizer that the scheduler belongs to is created anew; give "
            "HivemindStrategy(scheduler_fn=...) a function that makes a scheduler for it, for example "
            "scheduler_fn=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.99)"
        )
    return EpochSchedulers((_follows_epochs(config.scheduler), config.frequency) for config in configured)


def _follows_epochs(scheduler: Any) -> Any:
    if isinstance(scheduler, ReduceLROnPlateau):
        raise MisconfigurationException(
            "ReduceLROnPlateau follows a metric that each peer measures for itself, so their learning rates would "
            "drift apart, and a newcomer would begin with the first one. Use a scheduler that follows the epochs of "
            "the swarm, such as CosineAnnealingLR or ExponentialLR"
        )
    return scheduler
