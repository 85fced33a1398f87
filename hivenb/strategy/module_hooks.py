"""Hooks of a LightningModule that act on a step, while the steps are the swarm's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from hivenb.engine.optimizer.optimizer import Optimizer

# -- running statistics ----------------------------------------------------------------------------------------------
#
# Running statistics of normalization layers, which no batch may spoil that is skipped.


class RunningStatistics:
    """The running statistics of a module, such as BatchNorm's, as they were after the last step.

    One batch with nan makes them nan for good, and with them each validation: the forward pass adds it to them before
    its gradients are known.

    :param module: on its device
    """

    def __init__(self, module: nn.Module):
        self._layers = [layer for layer in module.modules() if getattr(layer, "running_mean", None) is not None]
        self._kept = [buffer.clone() for buffer in self._buffers()]

    @property
    def are_there(self) -> bool:
        """Whether the module has any."""
        return bool(self._kept)

    def _buffers(self) -> list[torch.Tensor]:
        return [buffer for layer in self._layers for buffer in layer.buffers(recurse=False)]

    @torch.no_grad()
    def follow(self, counts: bool) -> None:
        """Keep what there is, or put back what was kept last.

        :param counts: whether what there is counts; if not, it is of a batch that is skipped
        """
        for kept, now in zip(self._kept, self._buffers(), strict=True):
            if counts:
                kept.copy_(now)
            else:
                now.copy_(kept)


# -- module hooks ----------------------------------------------------------------------------------------------------


_MISSING = object()
_LIGHTNINGS_OWN = ("lightning.", "pytorch_lightning.")

#: Hooks of each batch that do nothing in a LightningModule, and where Lightning defines them.
_EMPTY = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
#: Hooks that take a model's gradients away: before a batch, and before a validation.
_ZERO_GRAD = ("optimizer_zero_grad", "on_validation_model_zero_grad")
_DEFINED_IN = ("lightning.pytorch.core.hooks", "pytorch_lightning.core.hooks")


class ModuleHooks:
    """Hooks of a module that are replaced for the time of a ``fit``.

    :param module: the LightningModule
    """

    def __init__(self, module: Any):
        self._module = module
        self._own: dict[str, Any] = {}
        self._clipping: Any = None

    def skip_empty(self) -> None:
        """Let Lightning pass over the hooks of each batch that nobody has overridden."""
        # it enters a context of its profiler for each, and notes its name in the module: a tenth of what a batch takes
        for name in _EMPTY:
            if getattr(getattr(self._module, name), "__module__", None) in _DEFINED_IN:
                self._replace(name, _PassedOver)

    def disable_zero_grad(self) -> None:
        """Let ``optimizer_zero_grad`` have no effect: gradients of earlier batches are still needed.

        hivemind clears them itself. A hook of the user's own is warned about.
        """
        if "optimizer_zero_grad" in self._own:
            return
        hook, _ = self._find("optimizer_zero_grad")
        if not _is_lightnings(hook):
            rank_zero_warn(
                f"{type(self._module).__name__}.optimizer_zero_grad has no effect with reuse_grad_buffers=True: "
                "gradients are accumulated in the model, and hivemind clears them"
            )
        for name in _ZERO_GRAD:
            self._replace(name, _Silenced)

    def warn_of_own_scheduler_step(self) -> None:
        """Say that a hook of the user's own which moves schedulers does not: the swarm epochs do."""
        if not _is_lightnings(self._module.lr_scheduler_step):
            rank_zero_warn(
                f"{type(self._module).__name__}.lr_scheduler_step does not move the scheduler it is given: schedulers "
                "move with the swarm epochs, by scheduler.step() without arguments"
            )

    def enable_zero_grad(self) -> None:
        """Let ``optimizer_zero_grad`` have its effect again."""
        for name in _ZERO_GRAD:
            self._put_back(name)

    def follow(self, optimizer: Optimizer) -> None:
        """Let the module's gradients be clipped in the swarm's step, and batches that are skipped spoil nothing in it.

        :param optimizer: the swarm's
        """
        optimizer.compensation.clip = self.clip_at(optimizer.opt)
        if optimizer.offload_optimizer:
            self._warn_of_clipped_parameters()
        statistics = RunningStatistics(self._module)
        optimizer.skipped_batches.on_batch = statistics.follow if statistics.are_there else None

    def clip_at(self, optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], None] | None:
        """Clip the gradients of the swarm's step instead of those of each batch.

        All peers then clip the same average, as one process does with one large batch.

        :param optimizer: the torch optimizer that makes the swarm's step
        :returns: clips the gradients of an optimizer as is done there; ``None`` if the module clips for itself
        """
        if not self._module.automatic_optimization:
            return None
        clip, trainer = self._find("configure_gradient_clipping")[0], self._module.trainer
        self._replace("configure_gradient_clipping", _Silenced)

        def clip_before_step(stepping: torch.optim.Optimizer, *args: Any) -> None:
            clip(
                stepping,
                gradient_clip_val=trainer.gradient_clip_val,
                gradient_clip_algorithm=trainer.gradient_clip_algorithm,
            )

        self._clipping = optimizer.register_step_pre_hook(clip_before_step)
        return clip_before_step

    def _warn_of_clipped_parameters(self) -> None:
        """Say that a hook of the user's own may clip gradients that no step is made with."""
        hook, _ = self._find("configure_gradient_clipping")
        names = getattr(getattr(hook, "__code__", None), "co_names", ())
        if self._module.automatic_optimization and {"parameters", "named_parameters"}.intersection(names):
            rank_zero_warn(
                f"{type(self._module).__name__}.configure_gradient_clipping looks at the module's parameters. An "
                "optimizer in main memory (offload_optimizer=True, and with it all delays) steps with copies of them, "
                "which have gradients of their own: clip those of the given optimizer, in optimizer.param_groups"
            )

    def restore(self) -> None:
        """Put the module's own hooks back, and take that off its optimizer which may be used again."""
        if self._clipping is not None:
            self._clipping.remove()
        for name in list(self._own):
            self._put_back(name)

    def _put_back(self, name: str) -> None:
        if name not in self._own:
            return
        own = self._own.pop(name)
        if not isinstance(vars(self._module).get(name), _Replaced):
            return  # somebody else has put another one in its place by now
        if own is _MISSING:
            vars(self._module).pop(name)
        else:
            setattr(self._module, name, own)

    def _replace(self, name: str, kind: type[_Replaced]) -> None:
        hook, self._own[name] = self._find(name)
        setattr(self._module, name, kind(hook, self._own[name]))

    def _find(self, name: str) -> tuple[Any, Any]:
        """A hook, and the same as far as it is an attribute of the module itself."""
        hook = getattr(self._module, name)
        if isinstance(hook, _Replaced):  # by somebody else, who has not put it back yet
            return hook.__wrapped__, hook.own
        return hook, vars(self._module).get(name, _MISSING)


def _is_lightnings(hook: Any) -> bool:
    return getattr(hook, "__module__", "").startswith(_LIGHTNINGS_OWN)


class _Replaced:
    """In place of a hook of the module that is trained; in a copy of that module there is the hook itself.

    :param hook: the module's
    :param own: the same as far as it was an attribute of the module itself
    """

    def __init__(self, hook: Any, own: Any):
        self.__wrapped__ = hook  # whether a hook is the user's own, Lightning sees by this
        self.own = own

    def __reduce__(self) -> Any:
        return _itself, (self.__wrapped__,)


class _Silenced(_Replaced):
    """Does nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        pass


class _PassedOver(_Replaced):
    """Cannot be called, which Lightning takes for there being no hook."""


def _itself(hook: Any) -> Any:
    return hook
