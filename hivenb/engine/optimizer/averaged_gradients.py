"""Gradients that a round has averaged: waited for, looked at, and handed to the optimizer that steps with them."""

from __future__ import annotations

from typing import Any

import hivemind
import torch
from hivemind.utils import get_logger

from hivenb.engine.averagers.finite import are_finite, where_not_finite
from hivenb.engine.optimizer.agreed_rounds import AgreedRounds
from hivenb.engine.rounds.round import Round

logger = get_logger(__name__)


class StepsWithAverages(hivemind.Optimizer):
    """Base to put *before* ``hivemind.Optimizer``: it steps with what a round has averaged, if that is finite.

    Each batch was looked at before, and all that came from others; but sums of finite numbers may be infinite.
    """

    grad_averager: Any
    state_averager: Any
    rounds: AgreedRounds

    def _average_gradients_and_load_into_optimizer(self, maybe_step_control: Round | None) -> None:
        # Replaces the method of hivemind/optim/optimizer.py, which after a failed round steps with zeros, as gradients
        # were reset when it began. The averager's tensors have this peer's own, and averages wherever those arrived.
        outcome = self.rounds.average_gradients(maybe_step_control)
        logger.log(self.status_loglevel, outcome.failed or f"Averaged gradients with {outcome.group_size} peers")
        self._load_averaged_gradients_into_optimizer_()

    def _load_averaged_gradients_into_optimizer_(self) -> None:
        with self.grad_averager.get_tensors() as averaged:
            where = None if are_finite(averaged) else where_not_finite(averaged)
        if where is not None:
            self.state_averager.leave_out_step()
            logger.warning(f"Epoch {self.local_epoch} ends without a step of the optimizer: {where}, as averaged")
        self._give_gradients()
        self.grad_averager.notify_used_averaged_gradients()

    def _give_gradients(self) -> None:
        # Replaces what hivemind/optim/optimizer.py:_load_averaged_gradients_into_optimizer_ does in the stream in which
        # the model computes, and with all parameters
        groups = self.state_averager.optimizer.param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        have_gradients = self.grad_averager.have_gradients()
        with self.grad_averager.get_tensors() as averaged:
            if self.offload_optimizer:  # which steps with the averaging buffers themselves
                for parameter, gradient, has_one in zip(parameters, averaged, have_gradients, strict=True):
                    parameter.grad = gradient if has_one else None
                return
            sources, targets = [], []
            for parameter, gradient, has_one in zip(parameters, averaged, have_gradients, strict=True):
                if not has_one:
                    parameter.grad = None
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                sources.append(gradient)
                targets.append(parameter.grad)
            self.grad_averager.copy_staged(sources, targets)
