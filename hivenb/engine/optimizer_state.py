"""State of a torch optimizer: made without a step, and taken over from a peer without moving the schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def initialize_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the state tensors of a fresh optimizer (moments, step counts) and leave all else as it was.

    Does nothing if the optimizer has state already. Parameters and gradients are unchanged, and the state is that
    of an optimizer that has not made a step yet.
    """
    if optimizer.state:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [(p.detach().clone(), p.grad) for p in parameters]
    decays = [group.get("weight_decay") for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            if "weight_decay" in group:
                group["weight_decay"] = 0.0  # SGD would take it into its momentum buffer
        for p in parameters:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    finally:
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            if decay is not None:
                group["weight_decay"] = decay
        with torch.no_grad():
            for p, (value, grad) in zip(parameters, kept, strict=True):
                p.copy_(value)
                p.grad = grad
    for state in optimizer.state.values():
        for name, unmade in (("step", 0), ("mu_product", 1)):  # the latter is NAdam's
            if name in state:
                state[name] = torch.full_like(state[name], unmade) if torch.is_tensor(state[name]) else unmade


def initialized_by(
    factory: Callable[[Any], torch.optim.Optimizer],
) -> Callable[[Any], torch.optim.Optimizer]:
    """The same factory of optimizers, which come with their state allocated."""

    def create(param_groups: Any) -> torch.optim.Optimizer:
        optimizer = factory(param_groups)
        initialize_optimizer_state(optimizer)
        return optimizer

    return create
