"""Scaling of gradients in half precision that goes with the way in which hivemind accumulates them."""

from __future__ import annotations

from typing import Any

import hivemind
import torch

from hivenb.engine.optimizer.left_out_batches import LeavesOutBatches


class GradScaler(hivemind.GradScaler):
    """``hivemind.GradScaler`` that hands on what ``step`` is given, such as the number of samples."""

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(optimizer, hivemind.Optimizer):  # called by hivemind, for the torch optimizer within
            return super().step(optimizer, *args, **kwargs)
        if isinstance(optimizer, LeavesOutBatches):
            optimizer.left_out.scale = self.get_scale
        # hivemind/optim/grad_scaler.py:step calls the optimizer with no arguments
        result = optimizer.step(*args, grad_scaler=self, **kwargs)
        self._optimizer_states_to_reset.add(id(optimizer))
        return result

    def pass_over(self, optimizer: Any) -> None:
        """Let an optimizer of the swarm end an epoch that is over, after a batch that has given no gradient."""
        self.step(optimizer, batch_size=0)
        self.update()


class GradScalerOfBatches(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` that hands each batch to the swarm's optimizer, which leaves out those it has to."""

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(optimizer, LeavesOutBatches):
            return super().step(optimizer, *args, **kwargs)
        optimizer.left_out.scale = self.get_scale
        seen = optimizer.left_out.seen
        result = super().step(optimizer, *args, **kwargs)
        if optimizer.left_out.seen == seen:
            # torch does not call it with gradients that are not finite: the others would wait for this peer in vain
            result = optimizer.step(*args, **kwargs)
        return result

    def pass_over(self, optimizer: Any) -> None:
        """Let an optimizer of the swarm end an epoch that is over, after a batch that has given no gradient."""
        optimizer.step(batch_size=0)


def scaler_for(scaler: torch.amp.GradScaler, reuse_grad_buffers: bool) -> torch.amp.GradScaler:
    """The scaler that hivemind needs in place of a given one, with its scale and settings.

    Gradients that are accumulated in place stay scaled until the swarm's step: that takes hivemind's scaler.
    Otherwise they are unscaled with each batch, as torch's does it.

    :param scaler: Lightning's, or the user's own
    :param reuse_grad_buffers: whether gradients are accumulated in the model's own buffers
    """
    return _as(GradScaler if reuse_grad_buffers else GradScalerOfBatches, scaler)


def scaler_of_one_peer(scaler: torch.amp.GradScaler) -> torch.amp.GradScaler:
    """A scaler for steps that one peer makes by itself, with the scale and settings of a given one."""
    return _as(torch.amp.GradScaler, scaler)


def _as(wanted: type[torch.amp.GradScaler], scaler: torch.amp.GradScaler) -> torch.amp.GradScaler:
    if type(scaler) is wanted:
        return scaler
    return wanted(
        device=scaler._device,
        init_scale=scaler.get_scale(),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
        enabled=scaler.is_enabled(),
    )
