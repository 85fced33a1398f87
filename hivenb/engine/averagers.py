"""Gradient and state averagers that can be born on any thread and change nothing but what they are asked to."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from hivemind.optim.grad_averager import GradientAverager as _GradientAverager
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager as _PowerSGDGradientAverager
from hivemind.optim.state_averager import TrainingStateAverager as _TrainingStateAverager

from hivenb.engine.optimizer_state import initialize_optimizer_state, initialized_by
from hivenb.engine.partition import PartsCutAlike
from hivenb.engine.settled_averager import SettledAverager


class WeighedBySamples(_GradientAverager):
    """Mixin to put *before* a gradient averager, so that batches of different sizes count by their samples."""

    def load_accumulators_into_averager_(self) -> None:
        # hivemind/optim/grad_averager.py divides a sum in units of the first batch by the number of batches: with a
        # dataset's small last batch as the first one of an epoch, gradients are too large by a factor of about 30.
        times = self.local_times_accumulated
        if not self.reuse_grad_buffers and self._anchor_batch_size:
            self.local_times_accumulated = self.local_samples_accumulated / self._anchor_batch_size
        try:
            super().load_accumulators_into_averager_()
        finally:
            self.local_times_accumulated = times


class GradientAverager(WeighedBySamples, PartsCutAlike, _GradientAverager, SettledAverager):
    """``hivemind``'s ``GradientAverager`` that can be created on any thread."""


class PowerSGDGradientAverager(WeighedBySamples, PartsCutAlike, _PowerSGDGradientAverager, SettledAverager):
    """``hivemind``'s ``PowerSGDGradientAverager`` that can be created on any thread."""


class TrainingStateAverager(PartsCutAlike, _TrainingStateAverager, SettledAverager):
    """``hivemind.TrainingStateAverager`` that can be created on any thread and leaves the parameters as they are."""

    def _init_components(
        self,
        param_groups: Any,
        optimizer_or_factory: Any,
        scheduler_or_factory: Any,
        initialize_optimizer: bool | None,
    ) -> tuple[torch.optim.Optimizer, Any]:
        # Works around hivemind/optim/state_averager.py:initialize_optimizer_state_, a real step with zero gradients
        # that decays the weights and counts as the first one in Adam's bias correction.
        if initialize_optimizer is not False:
            if isinstance(optimizer_or_factory, torch.optim.Optimizer):
                initialize_optimizer_state(optimizer_or_factory)
            else:
                optimizer_or_factory = initialized_by(optimizer_or_factory)
        return super()._init_components(param_groups, optimizer_or_factory, scheduler_or_factory, False)


def settled_factory(factory: Callable[..., Any] | None) -> Callable[..., Any]:
    """The same factory of a gradient averager, so that what it makes can be created on any thread.

    :param factory: a subclass of ``hivemind.optim.grad_averager.GradientAverager``, a ``functools.partial`` of one,
      or ``None`` for the default
    :raises TypeError: if it is neither; such a factory makes its averager start where we cannot reach it
    """
    if factory is None:
        return GradientAverager
    if isinstance(factory, partial):
        return partial(settled_factory(factory.func), *factory.args, **factory.keywords)
    if not (isinstance(factory, type) and issubclass(factory, _GradientAverager)):
        raise TypeError(
            f"grad_averager_factory is {factory!r}; it must be a subclass of "
            "hivemind.optim.grad_averager.GradientAverager or a functools.partial of one, such as "
            "partial(PowerSGDGradientAverager, averager_rank=32)"
        )
    if issubclass(factory, SettledAverager):
        return factory
    return type(factory.__name__, (WeighedBySamples, PartsCutAlike, factory, SettledAverager), {})
