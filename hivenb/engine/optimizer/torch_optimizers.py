"""Torch's optimizers: which of them hivemind can drive, and how to create another one like the one that is given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


def find_obstacle(optimizer: torch.optim.Optimizer, modules: Iterable[nn.Module], offloaded: bool) -> str | None:
    """Why hivemind cannot drive an optimizer, in words; ``None`` if it can.

    :param modules: of the model that it trains
    :param offloaded: whether it is to work on copies of the parameters in host memory
    """
    name = type(optimizer).__name__
    if not any(parameter.requires_grad for group in optimizer.param_groups for parameter in group["params"]):
        return (
            f"all parameters that {name} was given are frozen (requires_grad=False), so there is nothing to train; "
            "unfreeze those that are to be trained before training begins"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return (
            f"{name} computes the loss anew several times in each step (step() needs a closure), but the gradients of "
            "a step are averages over peers; use an optimizer that makes a step from one gradient, such as AdamW"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        return f"{name} needs sparse gradients, and peers average dense ones; use Adam"
    if not offloaded and any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse for m in modules):
        return "an embedding has sparse gradients, and peers average dense ones; create it with sparse=False"
    unknown = _arguments(optimizer)[1] if offloaded else []
    if unknown:
        return (
            f"with offload_optimizer=True, {name} is created anew for parameters in host memory, but its argument "
            f"{', '.join(unknown)} cannot be read off it; keep it in an attribute of the same name"
        )
    return None


def factory_like(optimizer: torch.optim.Optimizer) -> Callable[[Any], torch.optim.Optimizer]:
    """A factory of optimizers that are set up as this one is, for other parameters in the same groups.

    What is called before and after a step of this one is called at theirs.
    """
    arguments = _arguments(optimizer)[0]

    def make(param_groups: Any) -> torch.optim.Optimizer:
        made = type(optimizer)(param_groups, **arguments)
        for hook in optimizer._optimizer_step_pre_hooks.values():
            made.register_step_pre_hook(hook)
        for hook in optimizer._optimizer_step_post_hooks.values():
            made.register_step_post_hook(hook)
        return made

    return make


def _arguments(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], list[str]]:
    """What an optimizer was created with, as far as it tells, and the names of what has to be given and it does not."""
    arguments, unknown = {}, []
    for name, parameter in list(inspect.signature(type(optimizer)).parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in optimizer.defaults or hasattr(optimizer, name):
            arguments[name] = optimizer.defaults[name] if name in optimizer.defaults else getattr(optimizer, name)
        elif parameter.default is parameter.empty:
            unknown.append(name)
    return arguments, unknown
