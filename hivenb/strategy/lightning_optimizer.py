"""The engine's optimizer as Lightning's hooks and callbacks know one: what they set in its groups has an effect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from hivenb.engine.optimizer.optimizer import Optimizer
from hivenb.strategy.checks import LATER


class SteeredOptimizer(Optimizer):
    """The engine's optimizer, whose rates are those of the torch optimizer that makes the steps."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer. By this, ``LearningRateMonitor`` sees that it is the schedulers'."""
        return self.opt

    @property
    def param_groups(self) -> Sequence[dict[str, Any]]:
        """The groups of the torch optimizer, with the parameters of the model; what is set in one is set there."""
        # hivemind/optim/optimizer.py:param_groups gives copies: a rate that a hook sets is lost without a word
        if not self.offload_optimizer:
            return self.opt.param_groups
        groups = zip(self.opt.param_groups, super().param_groups, strict=True)
        return tuple(_Group(group, shown["params"]) for group, shown in groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not while training.

        :raises MisconfigurationException: which says what to do instead
        """
        raise MisconfigurationException(
            "Parameters cannot be added to the optimizer of a swarm while it trains: what peers average is laid down "
            f"when training begins. {LATER}"
        )

    @property
    def state(self) -> dict[Any, Any]:
        """The state of the torch optimizer, by its parameters; of an offloaded one, to be looked at only."""
        # Lightning moves what it finds here to the model's device, and an offloaded optimizer steps in main memory
        known: dict[Any, Any] = super().state
        if not self.offload_optimizer:
            return known
        return {key: dict(value) if isinstance(value, dict) else value for key, value in known.items()}


class _Group(dict[str, Any]):
    """A parameter group with other parameters.

    :param group: where all else is set, too
    :param params: the model's
    """

    def __init__(self, group: dict[str, Any], params: Any):
        super().__init__(group, params=params)
        self._group = group

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        if name != "params":
            self._group[name] = value

    def update(self, *args: Any, **kwargs: Any) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value
