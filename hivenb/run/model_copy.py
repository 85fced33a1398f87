"""A copy of a model that training goes on with: the weights of one moment, and nothing that belongs to the training."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hivenb.errors import TrainingError

#: Methods that a compiled LightningModule has in its own attributes.
_COMPILED = ("forward", "training_step", "validation_step", "test_step", "predict_step")

#: How deep tensors are looked for in lists and dicts of a module.
_DEPTH = 4


def checked_device(device: Any) -> torch.device:
    """The device that somebody has named.

    :raises TrainingError: if there is none of that name
    """
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except Exception as error:
        raise TrainingError(
            f"device={device!r} is none of this machine: {type(error).__name__}: {error}. Use 'cpu', or 'cuda' where "
            "torch finds a GPU"
        ) from error
    return found


def model_of(model: Any) -> nn.Module:
    """The module itself, where it was given to ``torch.compile``."""
    original: nn.Module = getattr(model, "_orig_mod", model)
    return original


@torch.no_grad()
def copy_of(
    model: Any, device: torch.device, instead: Mapping[torch.Tensor, torch.Tensor] = MappingProxyType({})
) -> nn.Module:
    """Copy a model as it is now, straight to a device; to be called while nobody changes it.

    The Trainer, its strategy, and optimizers that the module keeps are left out.

    :param model: a LightningModule, maybe a compiled one
    :param device: of the copy's tensors
    :param instead: by tensor of the model, other values that the copy is to have of it
    :raises TrainingError: if it cannot be copied, with the attribute that is to blame
    """
    original = model_of(model)
    memo: dict[int, Any] = {}
    values = {id(tensor): value for tensor, value in instead.items()}
    for owner in _left_out(original):
        memo[id(owner)] = None
    for module in original.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            _place(memo, tensor, device, values.get(id(tensor)))
        for attribute in vars(module).values():
            for tensor in _tensors_in(attribute):
                _place(memo, tensor, device, values.get(id(tensor)))
    try:
        made: nn.Module = copy.deepcopy(original, memo)
    except Exception as error:
        raise TrainingError(
            f"this {type(original).__name__} cannot be copied{_to_blame(original, memo)}: {type(error).__name__}: "
            f"{error}. Keep it out of the module, or let copy.deepcopy(model) work by a __deepcopy__ or __getstate__"
        ) from error
    for module in made.modules():
        _forget_methods(module)
    return made


def ready_to_predict(made: nn.Module, device: torch.device) -> nn.Module:
    """Let a copy be in eval mode, without gradients.

    :param made: what :func:`copy_of` gave
    """
    for parameter in made.parameters():
        if not is_lazy(parameter):
            parameter.grad = None
            parameter.requires_grad_(False)
    return made.eval().to(device)


def _left_out(original: nn.Module) -> Iterator[Any]:
    """What belongs to the training, and is none of the copy's."""
    for module in original.modules():
        attributes = vars(module)
        trainer = attributes.get("_trainer")
        if trainer is not None:
            yield from (trainer, trainer.strategy, *trainer.strategy.optimizers)
            yield from trainer.strategy._lightning_optimizers
            yield trainer.fit_loop.trainer  # itself, of which the module has a proxy
        if (context := attributes.get("_compiler_ctx")) is not None:
            yield context
        for value in attributes.values():
            members = value if isinstance(value, (list, tuple)) else (value,)
            for one in members:
                if isinstance(one, (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)):
                    yield one


def _place(memo: dict[int, Any], tensor: Any, device: torch.device, instead: torch.Tensor | None) -> None:
    """Let a copy have a tensor's values on a device, without the graph that it is of.

    :param instead: other values to have; ``None`` for its own
    """
    if id(tensor) in memo or type(tensor) not in (torch.Tensor, nn.Parameter):
        return  # others, such as those of lazy modules, know themselves how they are copied
    made = tensor.detach().to(device, copy=True)
    if instead is not None:
        made.copy_(instead)
    memo[id(tensor)] = nn.Parameter(made, False) if isinstance(tensor, nn.Parameter) else made


def _tensors_in(value: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    if torch.is_tensor(value):
        yield value
    elif depth and isinstance(value, Mapping):
        for one in list(value.values()):
            yield from _tensors_in(one, depth - 1)
    elif depth and isinstance(value, (list, tuple, set, frozenset)):
        for one in list(value):
            yield from _tensors_in(one, depth - 1)


def _forget_methods(module: nn.Module) -> None:
    """Let a copied module have the methods of its class, where the original has them compiled, watched or silenced."""
    attributes = vars(module)
    attributes.pop("_compiled_call_impl", None)
    if "_compiler_ctx" in attributes and any(name in attributes for name in _COMPILED):
        attributes["_compiler_ctx"] = None
        for name in _COMPILED:
            attributes.pop(name, None)
    for name, value in list(attributes.items()):
        own = getattr(value, "__func__", None)
        if own is not None and value.__self__ is module and getattr(type(module), name, None) is own:
            del attributes[name]


def _to_blame(original: nn.Module, memo: Mapping[int, Any]) -> str:
    """Which attribute cannot be copied, in words."""
    for path, module in original.named_modules():
        for name, value in vars(module).items():
            if name in ("_modules", "_parameters", "_buffers") or id(value) in memo or name == "_trainer":
                continue
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:
                where = f"{path}.{name}" if path else name
                return f", for its attribute {where}, a {type(value).__name__}"
    return ""
