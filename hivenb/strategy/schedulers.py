"""Learning rate schedulers that move with the swarm epochs, so that all peers have the same rate."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hivenb.engine.optimizer.checkpoint import EpochSchedulers
from hivenb.strategy.schedule_ends import end_of


class HiveMindScheduler:
    """What Lightning and a module see of a scheduler that the swarm epochs move: all of it but a step of its own.

    :param scheduler: the scheduler that hivemind steps
    :param optimizer: the torch optimizer whose rate it sets; by default the scheduler's own
    """

    def __init__(self, scheduler: Any, optimizer: torch.optim.Optimizer | None = None):
        self.scheduler = scheduler
        self.optimizer: torch.optim.Optimizer = scheduler.optimizer if optimizer is None else optimizer

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: hivemind steps the scheduler once in each swarm epoch."""

    def get_last_lr(self) -> list[float]:
        """Learning rate of each parameter group."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler" or name.startswith("__"):  # a copy, which has none yet, would ask for it without end
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.scheduler, name)


MakeSchedulers = Callable[[torch.optim.Optimizer], EpochSchedulers]


def scheduler_maker(scheduler_fn: Any) -> MakeSchedulers:
    """What makes the schedulers of an optimizer out of ``scheduler_fn``.

    :param scheduler_fn: as given to :class:`hivenb.HivemindStrategy`: a function, or a scheduler
    """

    def make(optimizer: torch.optim.Optimizer) -> EpochSchedulers:
        scheduler = _follows_epochs(scheduler_fn if _is_made(scheduler_fn) else scheduler_fn(optimizer))
        if scheduler.optimizer is not optimizer:
            raise MisconfigurationException(
                f"the scheduler {type(scheduler).__name__} belongs to another optimizer than the one that "
                "configure_optimizers returned; give a function that makes one from an optimizer"
            )
        return EpochSchedulers([(scheduler, 1, end_of(scheduler, None))])

    return make


def schedulers_for_hivemind(
    configured: Sequence[Any],
    scheduler_fn: Any,
    optimizer: torch.optim.Optimizer,
    *,
    offloaded: bool,
    estimated: float | None,
) -> EpochSchedulers | MakeSchedulers | None:
    """What to give to ``hivemind.Optimizer`` as its scheduler.

    :param configured: Lightning's configurations of the schedulers that ``configure_optimizers`` made
    :param scheduler_fn: as given to :class:`hivenb.HivemindStrategy`
    :param optimizer: that ``configure_optimizers`` made
    :param offloaded: whether hivemind makes another one like it, to which the rates have to be carried over
    :param estimated: steps that the training was said to have, if ``configure_optimizers`` has asked
    :raises MisconfigurationException: if the schedulers do not follow epochs, or belong to another optimizer
    """
    moved = [
        (_follows_epochs(config.scheduler), config.frequency, end_of(config.scheduler, estimated))
        for config in configured
    ]
    if scheduler_fn is not None:
        if configured:
            rank_zero_warn("scheduler_fn replaces the scheduler that configure_optimizers returned")
        if not _is_made(scheduler_fn) or scheduler_fn.optimizer is not optimizer:
            return scheduler_maker(scheduler_fn)
        moved = [(_follows_epochs(scheduler_fn), 1, end_of(scheduler_fn, estimated))]
    elif any(config.interval == "epoch" for config in configured):
        rank_zero_warn(
            'Schedulers with interval="epoch", Lightning\'s default, move once in each swarm epoch too, that is '
            "with target_batch_size samples of all peers, and not with a pass through the data. Count what you give "
            'them, such as T_max or step_size, in these epochs, and return {"scheduler": ..., "interval": "step"}'
        )
    if not moved:
        return None
    return partial(EpochSchedulers, moved) if offloaded else EpochSchedulers(moved)


def shown_to_lightning(moved: EpochSchedulers | None, configured: Sequence[Any]) -> list[LRSchedulerConfig]:
    """Schedulers as Lightning is to see them.

    :param moved: those that hivemind moves, if there are any
    :param configured: Lightning's configurations of those that ``configure_optimizers`` made, which may have names
    """
    known = {id(config.scheduler): config for config in configured}
    # Lightning takes anything that has a scheduler's methods, whatever it says in its annotations
    shown: list[Any] = [] if moved is None else [HiveMindScheduler(one, moved.optimizer) for one in moved.schedulers]
    made = []
    for one in shown:
        config = known.get(id(one.scheduler))
        interval = _Both("step") if config is not None and config.interval == "epoch" else "step"
        made.append(LRSchedulerConfig(one, interval=interval, name=None if config is None else config.name))
    return made


class _Both(str):
    """The interval of a scheduler of passes, which the swarm moves within passes: for Lightning it is both.

    ``LearningRateMonitor`` then has a rate when a pass begins, which other callbacks may ask for, and between batches.
    """

    def __eq__(self, other: object) -> bool:
        return other in ("step", "epoch")

    __hash__ = str.__hash__


def _is_made(scheduler_fn: Any) -> bool:
    return isinstance(scheduler_fn, (LRScheduler, ReduceLROnPlateau))


def _follows_epochs(scheduler: Any) -> Any:
    if isinstance(scheduler, ReduceLROnPlateau):
        raise MisconfigurationException(
            "ReduceLROnPlateau follows a metric that each peer measures for itself, so their learning rates would "
            "drift apart, and a newcomer would begin with the first one. Use a scheduler that follows the swarm "
            "epochs, such as CosineAnnealingLR or ExponentialLR"
        )
    if not callable(getattr(scheduler, "step", None)):
        raise MisconfigurationException(
            f"{type(scheduler).__name__} has no step(), by which the swarm epochs could move it; return a "
            "scheduler with one, or none, and set the rate in a hook"
        )
    needed = [name for name, one in inspect.signature(scheduler.step).parameters.items() if _is_needed(one)]
    if needed:
        raise MisconfigurationException(
            f"{type(scheduler).__name__}.step needs {', '.join(needed)}, and schedulers move with the swarm "
            "epochs, by step() without arguments; use one that needs none"
        )
    return scheduler


def _is_needed(parameter: inspect.Parameter) -> bool:
    takes_any = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not takes_any
