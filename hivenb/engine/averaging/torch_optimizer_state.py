"""State of a torch optimizer: made without a step, and taken over from a peer without moving the schedule."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from hivemind.optim.state_averager import dump_optimizer_state
from hivemind.utils import nested_flatten, nested_map

from hivenb.errors import TrainingError

#: Of a learning rate, and of other numbers that a peer sends; torch fails with what is beyond single precision.
_LARGEST_SETTING = 1e18


def initialize_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the state tensors (moments, step counts) of parameters that have none, and leave all else as it was.

    Parameters and gradients are unchanged, and the state is that of parameters that have not been in a step yet: torch
    makes it with the first one. Peers need it before, as they exchange it, of parameters that nobody has used as well.
    No hook of the optimizer is called.

    :raises TrainingError: if it keeps its state in what cannot be sent to peers
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    without = [p for p in parameters if not optimizer.state.get(p)]
    if not without:
        return
    gradients = [(p, p.grad) for p in parameters]
    kept = [(p, p.detach().clone()) for p in without]
    decays = [group.get("weight_decay") for group in optimizer.param_groups]
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        for group in optimizer.param_groups:
            if "weight_decay" in group:
                group["weight_decay"] = 0.0  # SGD would take it into its momentum buffer
        for p in parameters:
            p.grad = None
        for p in without:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            if decay is not None:
                group["weight_decay"] = decay
        with torch.no_grad():
            for p, value in kept:
                p.copy_(value)
        for p, gradient in gradients:
            p.grad = gradient
    rates = {p: group["lr"] for group in optimizer.param_groups for p in group["params"] if "lr" in group}
    for p in without:
        state = optimizer.state.get(p, {})
        for name, unmade in (("step", 0), ("mu_product", 1)):  # the latter is NAdam's
            if name in state:
                state[name] = torch.full_like(state[name], unmade) if torch.is_tensor(state[name]) else unmade
        if "eta" in state:  # ASGD's rate of the next step
            state["eta"].fill_(rates[p])
        _require_plain_tensors(optimizer, state.values())


def _require_plain_tensors(optimizer: torch.optim.Optimizer, state: Iterable[Any]) -> None:
    for one in state:
        if hasattr(one, "__tensor_flatten__"):  # made of others, as torchao's of few bits
            raise TrainingError(
                f"{type(optimizer).__name__} keeps its state in tensors of the class {type(one).__name__}, which "
                "cannot be sent to peers that join. Use an optimizer that keeps plain tensors: one of torch.optim, or "
                "with 8 bits one of bitsandbytes.optim"
            )


def initialized_by(
    factory: Callable[[Any], torch.optim.Optimizer],
) -> Callable[[Any], torch.optim.Optimizer]:
    """The same factory of optimizers, which come with their state allocated."""

    def create(param_groups: Any) -> torch.optim.Optimizer:
        optimizer = factory(param_groups)
        initialize_optimizer_state(optimizer)
        return optimizer

    return create


def group_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What each parameter group is set to (learning rate, momentum...), without its parameters."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def restore_group_settings(optimizer: torch.optim.Optimizer, settings: Sequence[dict[str, Any]]) -> None:
    """Set the parameter groups to what :func:`group_settings` gave."""
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)


def restore_switches(optimizer: torch.optim.Optimizer, settings: Sequence[dict[str, Any]]) -> None:
    """Set of the parameter groups what is no number, such as ``fused``, to what :func:`group_settings` gave.

    It goes with the device of a peer, and torch fails with that of another one.
    """
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update({name: value for name, value in own.items() if value is None or isinstance(value, (bool, str))})


def lay_out_like_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Let statistics lie in memory as their parameters do, such as those with ``torch.channels_last``.

    Fused optimizers go over both as they lie there, and do not notice if they lie differently.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if torch.is_tensor(value) and value.shape == parameter.shape and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def state_mismatch(
    optimizer: torch.optim.Optimizer,
    extra_tensors: Sequence[torch.Tensor],
    metadata: Any,
    tensors: Sequence[torch.Tensor],
) -> str | None:
    """Why a state that a peer has sent cannot be loaded, in words; ``None`` if it can.

    :param optimizer: the one to load it into
    :param extra_tensors: tensors that are averaged beside the parameters
    :param metadata: what the peer sent with its tensors
    :param tensors: its parameters, extra tensors and optimizer state, in this order
    """
    values, own_state = dump_optimizer_state(optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    theirs = metadata.get("optimizer_metadata") if isinstance(metadata, dict) else None
    if not isinstance(theirs, list) or [_kind(value) for value in theirs] != [_kind(value) for value in values]:
        return (
            f"it has {len(theirs) if isinstance(theirs, list) else 'no'} values of an optimizer's state and settings, "
            f"and this peer's {type(optimizer).__name__} has {len(values)}"
        )
    for name, mine, other in zip(_names_of_values(optimizer), values, theirs, strict=True):
        if not _can_be(name, mine, other):
            return f"it has {_value_of(other)!r:.60} for {name}, and this peer has {_value_of(mine)!r:.60}"
    own = [*parameters, *extra_tensors, *own_state]
    if len(own) != len(tensors):
        return f"it has {len(tensors)} tensors, and this peer has {len(own)}"
    for number, (mine, other) in enumerate(zip(own, tensors, strict=True), start=1):
        if mine.shape != other.shape:
            return f"its tensor {number} of {len(own)} has the shape {tuple(other.shape)}, not {tuple(mine.shape)}"
    return None


def _kind(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else None


def _value_of(entry: dict[str, Any]) -> Any:
    return entry.get("index" if entry["type"] == "tensor" else "value")


def _names_of_values(optimizer: torch.optim.Optimizer) -> list[str]:
    """What each value is called that ``dump_optimizer_state`` gives."""
    known = optimizer.state_dict()
    groups = [
        {name: nested_map(lambda _, name=name: name, group[name]) for name in group} for group in known["param_groups"]
    ]
    state = nested_map(lambda _: "state", known["state"])
    return list(nested_flatten({"state": state, "param_groups": groups}))


def _can_be(name: str, mine: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether a step could be made with another peer's value; tensors, and parameters' numbers, have their places."""
    own, value = _value_of(mine), _value_of(other)
    if mine["type"] == "tensor" or name == "params":
        return type(value) is int and value == own
    if not _is_number(own):  # a switch, which stays this peer's own
        return own is None or isinstance(own, (bool, str)) or type(value) is type(own)
    if not _is_number(value) or not math.isfinite(value):
        return False
    if name == "momentum" and bool(value) != bool(own):
        return False  # a buffer goes with it
    return 0 <= value < 1 if name == "betas" else abs(value) < _LARGEST_SETTING and (value >= 0 or own < 0)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@torch.no_grad()
def add_change(tensor: torch.Tensor, average: torch.Tensor, sent: torch.Tensor, *, is_statistic: bool) -> None:
    """Let a tensor that has gone on during a round have what the round has changed.

    A statistic goes no further than to the average or stays where it is, whichever is beyond: a second moment that has
    decayed meanwhile could become negative, and the next step nan.

    :param tensor: of the model or its optimizer
    :param average: that the round has made of what was sent
    :param sent: as the tensor was when the round began
    :param is_statistic: whether it is one of the optimizer's
    """
    change = torch.sub(average, sent).to(device=tensor.device, dtype=tensor.dtype)
    if not is_statistic:
        tensor.add_(change)
        return
    there = average.to(device=tensor.device, dtype=tensor.dtype)
    tensor.copy_((tensor + change).clamp(torch.minimum(there, tensor), torch.maximum(there, tensor)))
