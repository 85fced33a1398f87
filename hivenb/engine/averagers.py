"""Gradient and state averagers that can be born on any thread and change nothing but what they are asked to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from hivemind.optim.grad_averager import GradientAverager as _GradientAverager
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager as _PowerSGDGradientAverager
from hivemind.optim.state_averager import TrainingStateAverager as _TrainingStateAverager

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


class WeighedBySamples(_GradientAverager):
    """Mixin to put *before* a gradient averager: batches count by their samples, and are summed in single precision."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], *args: Any, **kwargs: Any):
        # hivemind/optim/grad_averager.py takes the gradients' own type: sums of many batches in bfloat16 stop to grow,
        # and torch does not accept them as gradients of an offloaded copy in float32
        parameters = tuple(parameters)
        types = [torch.promote_types(parameter.dtype, torch.float32) for parameter in parameters]
        if not kwargs.get("averaged_grads"):
            kwargs["averaged_grads"] = tuple(
                torch.zeros(parameter.shape, dtype=dtype).share_memory_()
                for parameter, dtype in zip(parameters, types, strict=True)
            )
        super().__init__(parameters, *args, **kwargs)
        if self._local_accumulators is not None:
            self._local_accumulators = tuple(
                accumulator.to(dtype) for accumulator, dtype in zip(self._local_accumulators, types, strict=True)
            )

    #: Samples for which a gradient counts as one where they are summed in the model's own buffers, by whoever computes
    #: them: each was weighed by its samples over these. By default all batches are taken for equally large.
    samples_of_weight_one: float | None = None

    def load_accumulators_into_averager_(self) -> None:
        # hivemind/optim/grad_averager.py divides a sum in units of the first batch by the number of batches: with a
        # dataset's small last batch as the first one of an epoch, gradients are too large by a factor of about 30.
        times, self.local_times_accumulated = self.local_times_accumulated, self._weight_of_all()
        try:
            super().load_accumulators_into_averager_()
        finally:
            self.local_times_accumulated = times

    def _weight_of_all(self) -> float:
        """By what the sum of the accumulated gradients is to be divided."""
        unit = self.samples_of_weight_one if self.reuse_grad_buffers else self._anchor_batch_size
        return self.local_samples_accumulated / unit if unit else self.local_times_accumulated

    @torch.no_grad()
    def mean_gradients(self) -> tuple[torch.Tensor, ...] | None:
        """The mean gradient over the samples of the present epoch, one tensor for each parameter; ``None`` if none."""
        if not self.local_samples_accumulated:
            return None
        divisor = self._weight_of_all()
        return tuple(accumulator.detach().clone().div_(divisor) for accumulator in self._grad_accumulators())

    @torch.no_grad()
    def set_mean_gradients(self, gradients: Iterable[torch.Tensor], samples: int) -> None:
        """Begin with what was accumulated before, as if it were one batch.

        :param gradients: the mean over those samples, one tensor for each parameter
        """
        self.local_samples_accumulated, self.local_times_accumulated = samples, 1
        self._anchor_batch_size = samples
        for accumulator, gradient in zip(self._grad_accumulators(), gradients, strict=True):
            accumulator.copy_(gradient).mul_(self._weight_of_all())


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
