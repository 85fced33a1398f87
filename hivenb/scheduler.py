"""What Lightning sees of a learning rate scheduler that the swarm's epochs move."""

from __future__ import annotations

from typing import Any

import torch


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
