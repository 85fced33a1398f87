"""Several learning rate schedulers as the one that hivemind moves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from hivenb.engine.averagers.torch_optimizer_state import group_settings, restore_group_settings


class EpochSchedulers(LRScheduler):
    """Schedulers of one optimizer, which hivemind moves as one, a step for each epoch of the swarm.

    :param schedulers: each with its frequency, the number of the swarm's epochs between two of its steps
    :param stepping: the torch optimizer that makes the steps, where that is another one than the schedulers'. It has
      as many parameter groups; what they are set to is carried over, group by group, whenever the schedulers move
    """

    def __init__(self, schedulers: Iterable[tuple[Any, int]], stepping: torch.optim.Optimizer | None = None):
        # without LRScheduler.__init__, which would set the rates once more
        self._schedulers = tuple(schedulers)
        self._stepping = stepping
        #: epochs of the swarm that these schedulers have been moved through
        self.epoch = 0

    @property
    def schedulers(self) -> tuple[Any, ...]:
        """The schedulers, as they were given."""
        return tuple(scheduler for scheduler, _ in self._schedulers)

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
        due = [scheduler for scheduler, frequency in self._schedulers if self.epoch % frequency == 0]
        if due and self._stepping is not None:
            _follow(due[0].optimizer, self._stepping)
        for scheduler in due:
            scheduler.step()
        if due and self._stepping is not None:
            restore_group_settings(self._stepping, group_settings(due[0].optimizer))


def _follow(own: torch.optim.Optimizer, stepping: torch.optim.Optimizer) -> None:
    """Let schedulers see an optimizer that never steps as they would see the one that does.

    It has the rates from which they go on, be they out of a checkpoint or set by hand, and the state.

    :param own: the schedulers'
    """
    restore_group_settings(own, group_settings(stepping))
    for group, other in zip(own.param_groups, stepping.param_groups, strict=True):
        for parameter, copied in zip(group["params"], other["params"], strict=True):
            if copied in stepping.state:
                own.state[parameter] = stepping.state[copied]
    own._opt_called = True  # type: ignore[attr-defined] # else they would warn that it has not stepped
    own._step_count = 1  # type: ignore[attr-defined] # as torch before 2.4 calls it
