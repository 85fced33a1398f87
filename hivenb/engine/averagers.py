"""Gradient and state averagers that can be born on any thread and change nothing but what they are asked to."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from hivemind.optim.grad_averager import GradientAverager as _GradientAverager
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager as _PowerSGDGradientAverager
from hivemind.optim.state_averager import TrainingStateAverager as _TrainingStateAverager

from hivenb.engine.gradient_sums import WeighedBySamples
from hivenb.engine.optimizer_state import (
    group_settings,
    initialize_optimizer_state,
    initialized_by,
    restore_group_settings,
    state_mismatch,
)
from hivenb.engine.partition import PartsCutAlike
from hivenb.engine.power_sgd import KeepsFewComponents
from hivenb.engine.prompt_all_reduce import PromptAllReduce
from hivenb.engine.settled_averager import SettledAverager
from hivenb.errors import SwarmError


class GradientAverager(WeighedBySamples, PartsCutAlike, PromptAllReduce, _GradientAverager, SettledAverager):
    """``hivemind``'s ``GradientAverager`` that can be created on any thread."""


class PowerSGDGradientAverager(
    WeighedBySamples, PartsCutAlike, KeepsFewComponents, PromptAllReduce, _PowerSGDGradientAverager, SettledAverager
):
    """``hivemind``'s ``PowerSGDGradientAverager`` that can be created on any thread."""


class _CheckedDownload(SettledAverager):
    """Base to put *behind* hivemind's state averager: a state of another structure is an error."""

    optimizer: torch.optim.Optimizer
    extra_tensors: Any

    def load_state_from_peers(self, *args: Any, **kwargs: Any) -> Any:
        # hivemind/optim/state_averager.py:load_optimizer_state checks nothing: with a scheduler at one peer and none
        # at the other, each number lands in the place of another one
        loaded = super().load_state_from_peers(*args, **kwargs)
        mismatch = None if loaded is None else state_mismatch(self.optimizer, self.extra_tensors, *loaded)
        if mismatch is not None:
            raise SwarmError(
                f"the state of the swarm does not fit this peer: {mismatch}. All peers need the same model, optimizer "
                "and parameter groups, and either all or none of them a scheduler"
            )
        return loaded


class TrainingStateAverager(PartsCutAlike, PromptAllReduce, _TrainingStateAverager, _CheckedDownload):
    """``hivemind.TrainingStateAverager`` that can be created on any thread and leaves the parameters as they are."""

    _steps_to_come = 0

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
        optimizer, scheduler = super()._init_components(param_groups, optimizer_or_factory, scheduler_or_factory, False)
        self._hooks = (
            optimizer.register_step_pre_hook(self._leave_out_frozen_parameters),
            optimizer.register_step_post_hook(self._put_gradients_back),
        )
        return optimizer, scheduler

    def let_go_of_optimizer(self) -> None:
        """Take the hooks off the torch optimizer, which another averager is to go on with."""
        for hook in self._hooks:
            hook.remove()

    def _leave_out_frozen_parameters(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        # hivemind/optim/grad_averager.py gives each parameter a gradient, of zeros if need be, and weight decay
        # would change those that are not to be trained
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._left_out = []
        for main, parameter in zip(self.main_parameters, parameters, strict=True):
            if not main.requires_grad:
                self._left_out.append((parameter, parameter.grad))
                parameter.grad = None

    def _put_gradients_back(self, *args: Any) -> None:
        for parameter, gradient in self._left_out:
            parameter.grad = gradient

    def step(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("increment_epoch") and kwargs.get("optimizer_step"):
            self._steps_to_come = 1  # hivemind counts the epoch at once and makes the step of the optimizer later
        return super().step(*args, **kwargs)

    def _update_scheduler(self) -> None:
        super()._update_scheduler()
        self._steps_to_come = 0

    def get_current_state(self) -> tuple[Any, Any, Any]:
        # hivemind/optim/state_averager.py:get_current_state gives away the optimizer's own tensors, which change while
        # they are sent, under the number of an epoch whose step they may still lack
        with self.lock_optimizer:
            metadata, tensors, infos = super().get_current_state()
            metadata["epoch"] -= self._steps_to_come
            return metadata, tuple(tensor.clone() for tensor in tensors), infos

    def load_state_from_peers(self, **kwargs: Any) -> None:
        # hivemind/optim/state_averager.py:load_state_from_peers takes over the peer's learning rate, and then steps
        # the scheduler from there once for each epoch: ExponentialLR, for one, would decay twice
        scheduler, self.scheduler = self.scheduler, None
        settings = group_settings(self.optimizer)
        try:
            super().load_state_from_peers(**kwargs)
        finally:
            self.scheduler = scheduler
        if scheduler is not None:
            restore_group_settings(self.optimizer, settings)
            self._update_scheduler()


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
    mixins: tuple[type, ...] = (WeighedBySamples, PartsCutAlike)
    if issubclass(factory, _PowerSGDGradientAverager):
        mixins += (KeepsFewComponents,)
    return type(factory.__name__, (*mixins, PromptAllReduce, factory, SettledAverager), {})
