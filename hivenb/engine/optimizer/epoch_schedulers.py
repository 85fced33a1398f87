"""Several learning rate schedulers as the one that hivemind moves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler


class EpochSchedulers(LRScheduler):
    """Schedulers of one optimizer, which hivemind moves as one, a step for each epoch of the swarm.

    :param schedulers: each with its frequency, the number of the swarm's epochs between two of its steps
    """

    def __init__(self, schedulers: Iterable[tuple[Any, int]]):
        # without LRScheduler.__init__, which would set the rates once more
        self._schedulers = tuple(schedulers)
        #: epochs of the swarm that these schedulers have been moved through
        self.epoch = 0

    @property
    def schedulers(self) -> tuple[Any, ...]:
        """The schedulers, as they were given."""
        return tuple(scheduler for scheduler, _ in self._schedulers)

    @property
    def optimizer(self) -> torch.optim.Optimizer:  # type: ignore[override]
        """The torch optimizer whose rates they set."""
        return self._schedulers[0][0].optimizer

    @property
    def _step_count(self) -> int:  # type: ignore[override]
        """By this, hivemind/optim/state_averager.py:_update_scheduler sees how far it has to move them."""
        return self.epoch + 1

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Move them by one epoch of the swarm."""
        self.epoch += 1
        for scheduler, frequency in self._schedulers:
            if self.epoch % frequency == 0:
                scheduler.step()
