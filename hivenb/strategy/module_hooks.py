"""Hooks of a LightningModule that act on a step, while the steps are the swarm's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)

_MISSING = object()
_LIGHTNINGS_OWN = ("lightning.", "pytorch_lightning.")


class ModuleHooks:
    """Hooks of a module that are replaced for the time of a ``fit``.

    :param module: the LightningModule
    """

    def __init__(self, module: Any):
        self._module = module
        self._own: dict[str, Any] = {}

    def disable_zero_grad(self) -> None:
        """Let ``optimizer_zero_grad`` have no effect: gradients of earlier batches are still needed.

        hivemind clears them itself. A hook of the user's own is warned about.
        """
        if "optimizer_zero_grad" in self._own:
            return
        hook = self._module.optimizer_zero_grad
        if not getattr(hook, "__module__", "").startswith(_LIGHTNINGS_OWN):
            logger.warning(
                f"{type(self._module).__name__}.optimizer_zero_grad has no effect with reuse_grad_buffers=True: "
                "gradients are accumulated in the model, and hivemind clears them"
            )
        self._replace("optimizer_zero_grad", _do_nothing)

    def enable_zero_grad(self) -> None:
        """Let ``optimizer_zero_grad`` have its effect again."""
        self._put_back("optimizer_zero_grad")

    def clip_at(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip the gradients of the swarm's step instead of those of each batch.

        All peers then clip the same average, as one process does with one large batch.

        :param optimizer: the torch optimizer that makes the swarm's step
        """
        if not self._module.automatic_optimization:
            return  # such a module clips for itself
        clip, trainer = self._module.configure_gradient_clipping, self._module.trainer
        self._replace("configure_gradient_clipping", _do_nothing)

        def clip_before_step(stepping: torch.optim.Optimizer, *args: Any) -> None:
            clip(
                stepping,
                gradient_clip_val=trainer.gradient_clip_val,
                gradient_clip_algorithm=trainer.gradient_clip_algorithm,
            )

        optimizer.register_step_pre_hook(clip_before_step)

    def restore(self) -> None:
        """Put the module's own hooks back."""
        for name in list(self._own):
            self._put_back(name)

    def _put_back(self, name: str) -> None:
        if name not in self._own:
            return
        own = self._own.pop(name)
        delattr(self._module, name)
        if own is not _MISSING:
            setattr(self._module, name, own)

    def _replace(self, name: str, hook: Callable[..., Any]) -> None:
        self._own[name] = vars(self._module).get(name, _MISSING)
        setattr(self._module, name, hook)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    pass
