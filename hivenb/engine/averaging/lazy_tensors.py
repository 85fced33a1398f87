"""Tensors of a module that have no values yet: lazy layers make them with their first batch."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

#: What to do about them.
REMEDY = (
    "What peers average is laid down before the first batch, so run one through the model before: in its "
    "configure_model, such as self.layer(torch.zeros(1, 4)) for inputs of 4 numbers, or before training begins; at all "
    "peers"
)


def lazy_tensors(module: nn.Module) -> list[str]:
    """Names of the parameters, and of the buffers that ``state_dict()`` holds, that have no values yet."""
    found = []
    for prefix, owner in module.named_modules():
        start = f"{prefix}." if prefix else ""
        named = [*owner._parameters.items(), *owner._buffers.items()]
        for name, tensor in named:
            if tensor is not None and name not in owner._non_persistent_buffers_set and is_lazy(tensor):
                found.append(start + name)
    return found


def no_values(module: nn.Module, name: str) -> str:
    """What is wrong with one of them, and what to do, in words."""
    owner = type(module.get_submodule(name.rpartition(".")[0])).__name__
    return f"{name} has no values yet, as {owner} makes them with its first batch. {REMEDY}"
