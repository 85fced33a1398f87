"""Several learning rate schedulers as the one that hivemind moves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from hivenb.engine.averagers.torch_optimizer_state import group_settings, restore_group_settings


class EpochSchedulers(LRScheduler):
    """Schedulers of one optimizer, which hivemind moves as one, a step for each epoch of the swarm.

    :param schedulers: each with its frequency, the number of the swarm's epochs between two of its steps, and the step
      after which it is moved no more; ``None`` for one without an end. A swarm makes more epochs than one peer had
      reckoned with
    :param stepping: the torch optimizer that makes the steps, where that is another one than the schedulers'. It has
      as many parameter groups; what they are set to is carried over, group by group, whenever the schedulers move
    """

    def __init__(
        self, schedulers: Iterable[tuple[Any, int, int | None]], stepping: torch.optim.Optimizer | None = None
    ):
        # without LRScheduler.__init__, which would set the rates once more
        self._schedulers = tuple(schedulers)
        self._stepping = stepping
        #: epochs of the swarm that these schedulers have been moved through
        self.epoch = 0

    @property
    def schedulers(self) -> tuple[Any, ...]:
        """The schedulers, as they were given."""
        return tuple(scheduler for scheduler, _, _ in self._schedulers)

    @property
    def frequencies(self) -> tuple[int, ...]:
        """For each of them, the number of the swarm's epochs between two of its steps."""
        return tuple(frequency for _, frequency, _ in self._schedulers)

    @property
    def ended_at(self) -> int | None:
        """The epoch of the swarm after which none of them moves; ``None`` if one goes on for ever."""
        ends = [None if end is None else end * frequency for _, frequency, end in self._schedulers]
        return None if None in ends else max(end for end in ends if end is not None)

    @property
    def optimizer(self) -> torch.optim.Optimizer:  # type: ignore[override]
        """The torch optimizer whose rates they set: the one that makes the steps."""
        return self._schedulers[0][0].optimizer if self._stepping is None else self._stepping

    @property
    def _step_count(self) -> int:  # type: ignore[override]
        """By this, hivemind/optim/state_averager.py:_update_scheduler sees how far it has to move them."""
        return self.epoch + 1

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Move them by one epoch of the swarm."""
        self.epoch += 1
        due = [scheduler for scheduler, frequency, end in self._schedulers if _is_due(self.epoch, frequency, end)]
        if due and self._stepping is not None:
            _move_beside(self._stepping, due)
        else:
            for scheduler in due:
                scheduler.step()


def _is_due(epoch: int, frequency: int, end: int | None) -> bool:
    return epoch % frequency == 0 and (end is None or epoch // frequency <= end)


def _move_beside(stepping: torch.optim.Optimizer, schedulers: Sequence[Any]) -> None:
    """Move schedulers whose optimizer never steps as if it were the one that does, and carry over what they set.

    They see the rates from which they go on, be they out of a checkpoint or set by hand, and the state.

    :param stepping: the optimizer that steps
    :param schedulers: at least one, all of one optimizer
    """
    own = schedulers[0].optimizer
    restore_group_settings(own, group_settings(stepping))
    own._opt_called = True  # else they would warn that it has not stepped
    own._step_count = 1  # as torch before 2.4 calls it
    state, own.state = own.state, _state_of(stepping, own)
    try:
        for scheduler in schedulers:
            scheduler.step()
    finally:
        own.state = state
    restore_group_settings(stepping, group_settings(own))


def _state_of(stepping: torch.optim.Optimizer, own: torch.optim.Optimizer) -> dict[Any, Any]:
    """The state of an optimizer, under the parameters of another one."""
    groups = zip(stepping.param_groups, own.param_groups, strict=True)
    pairs = (pair for group, other in groups for pair in zip(group["params"], other["params"], strict=True))
    known = {parameter: stepping.state[copied] for copied, parameter in pairs if copied in stepping.state}
    return defaultdict(dict, known)
