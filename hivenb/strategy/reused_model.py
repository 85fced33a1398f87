"""What somebody has left in a model between two trainings of it: that goes on, and what can be kept is kept."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hivenb.engine.averaging.torch_optimizer_state import group_settings
from hivenb.errors import TrainingError
from hivenb.swarm.agreement.model_record import describe_parameters

#: Beside the swarm epoch, in what a checkpoint holds of an optimizer.
_OURS = "hivemind"

#: How many names of parameters a sentence has.
_NAMED = 3

#: Shape, type and checksum of a parameter.
Prints = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True)
class LeftModel:
    """A model that is trained once more, with what it holds.

    :param edited: names of the parameters that somebody has changed since it was trained last
    :param replaced: names of those that are other parameters now, such as those of a new head
    """

    edited: tuple[str, ...] = ()
    replaced: frozenset[str] = frozenset()


def prints_of(module: nn.Module) -> Prints:
    """What the parameters of a module can be known by, so that a change shows."""
    return {name: _print(parameter) for name, parameter in module.named_parameters()}


def edited_since(before: Prints, module: nn.Module) -> tuple[str, ...]:
    """Names of the parameters of a module that are others than they were, or new."""
    now = prints_of(module)
    return tuple(name for name, one in now.items() if before.get(name) != one)


@torch.no_grad()
def _print(parameter: torch.Tensor) -> tuple[Any, ...]:
    if nn.parameter.is_lazy(parameter):
        return ("lazy",)
    known = (tuple(parameter.shape), str(parameter.dtype))
    if parameter.is_meta or parameter.layout is not torch.strided:
        return known
    flat = parameter.detach().to("cpu").contiguous().flatten()
    return (*known, zlib.crc32(flat.view(torch.uint8).numpy().data))


def in_words(names: Sequence[str]) -> str:
    """Some names of parameters, as a sentence has them."""
    further = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {further} more" if further > 0 else "")


def not_trained(module: nn.Module, trained: Iterable[torch.Tensor]) -> frozenset[int]:
    """Ids of the parameters of a module that need gradients, and that no optimizer has."""
    known = {id(parameter) for parameter in trained}
    return frozenset(id(p) for p in module.parameters() if p.requires_grad and id(p) not in known)


def changed_structure(module: nn.Module, trained: Iterable[torch.Tensor], before: frozenset[int]) -> str | None:
    """What parameters somebody has put into a module, or taken out, since its optimizer was made, in words.

    :param trained: parameters that the optimizer has
    :param before: what :func:`not_trained` gave when it was as it should be
    :returns: ``None`` if there is nothing of the kind
    """
    trained = list(trained)
    here = {id(parameter): name for name, parameter in module.named_parameters()}
    new = [here[one] for one in not_trained(module, trained) - before if one in here]
    if new:
        return f"{in_words(sorted(new))} of the model is new, or is to be trained now"
    gone = sum(id(parameter) not in here for parameter in trained)
    return f"{gone} parameters that it trains are no longer in the model" if gone else None


# -- the optimizer's state --------------------------------------------------------------------------------------------


def with_description(state: dict[str, Any], module: nn.Module, optimizer: Any, given: Any) -> dict[str, Any]:
    """The state of an optimizer, with which parameters it is of, and how it was set up.

    :param state: as a checkpoint holds it
    :param optimizer: whose state it is, with the parameters of the module
    :param given: what :func:`set_up_as` gave of it
    """
    described = [list(one) for one in describe_parameters(module, optimizer)]
    own = {**state.get(_OURS, {}), "parameters": described, "set_up": given}
    return {**state, _OURS: own}


def set_up_as(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """How somebody has set up an optimizer, before anything has changed it: its class, and plain settings by group.

    :param optimizer: as ``configure_optimizers`` gave it, whose schedulers may have moved to their first rates
    """
    groups = []
    for group in group_settings(optimizer):
        plain = {name: value for name, value in group.items() if _is_plain(value)}
        plain["lr"] = float(group.get("initial_lr", group.get("lr", 0.0)))
        groups.append(plain)
    return {"class": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}", "groups": groups}


def _is_plain(value: Any) -> bool:
    members = value if isinstance(value, (tuple, list)) else (value,)
    return all(isinstance(one, (bool, int, float, str, type(None))) for one in members)


def fitted_state(
    state: Mapping[str, Any],
    module: nn.Module,
    optimizer: Any,
    given: Mapping[str, Any],
    *,
    left: LeftModel | None,
) -> tuple[dict[str, Any], FittedGroups]:
    """The state of an optimizer for another one: what is of parameters of the same name and shape is kept.

    :param state: as a checkpoint holds it
    :param optimizer: that is to have it, fresh, with the parameters of the module
    :param given: what :func:`set_up_as` gave of it
    :param left: what was left in the module, whose settings count then, as far as somebody has changed them; ``None``
      if those of the state count
    :returns: the state to load; and what has become of the groups
    :raises TrainingError: if it is of other parameters, and does not say which
    """
    fresh = optimizer.opt.state_dict()
    now = describe_parameters(module, optimizer)
    own = state.get(_OURS, {})
    before = [(name, tuple(shape), *rest) for name, shape, *rest in own.get("parameters", ())]
    sizes = [len(group["params"]) for group in state["param_groups"]]
    if not before or len(before) != sum(sizes):
        if sizes != [len(group["params"]) for group in fresh["param_groups"]]:
            raise TrainingError(
                f"the checkpoint's optimizer has {sizes} parameters in its groups, and this one "
                f"{[len(group['params']) for group in fresh['param_groups']]}: with which of them to go on cannot be "
                "told. Set requires_grad, and build the optimizer, as they were; or begin anew with the weights "
                "alone, model.load_state_dict(torch.load(path)['state_dict'])"
            )
        return dict(state), FittedGroups((), tuple(range(len(sizes))), ())
    set_up = own.get("set_up", given)
    is_same_class = set_up["class"] == given["class"]
    groups = [[now[number] for number in group["params"]] for group in fresh["param_groups"]]
    old_groups: list[list[Any]] = [[before[number] for number in group["params"]] for group in state["param_groups"]]
    replaced = frozenset() if left is None else left.replaced
    if groups == old_groups and is_same_class and not replaced & {one[0] for one in now}:
        fitted = dict(state)
        sources: list[int | None] = list(range(len(groups)))
        begun: list[str] = []
    else:
        places = {one: number for number, one in enumerate(before)}
        kept, begun = {}, []
        for number, one in enumerate(now):
            is_new = not is_same_class or one not in places or one[0] in replaced
            found = None if is_new else state["state"].get(places[one])
            wanted = fresh["state"].get(number)
            if found is not None and (wanted is None or set(found) == set(wanted)):
                kept[number] = found
                continue
            if wanted is not None:
                kept[number] = wanted
            if is_new:
                begun.append(one[0])
        sources = [_source(group, old_groups) if is_same_class else None for group in groups]
        settings = [
            {**group, **(_but_parameters(state["param_groups"][source]) if source is not None else {})}
            for group, source in zip(fresh["param_groups"], sources, strict=True)
        ]
        fitted = {**state, "state": kept, "param_groups": settings}
    factors = []
    fitted["param_groups"] = [dict(group) for group in fitted["param_groups"]]
    for group, source, wish in zip(fitted["param_groups"], sources, given["groups"], strict=True):
        factor = 1.0
        if left is not None and source is not None and source < len(set_up["groups"]):
            factor = _follow(group, set_up["groups"][source], wish)
        factors.append(factor)
    return fitted, FittedGroups(tuple(begun), tuple(sources), tuple(factors))


def _source(group: list[Any], old_groups: Sequence[list[Any]]) -> int | None:
    """From which of the old groups a group goes on: the one that most of its parameters were in."""
    shared: list[int] = [len(set(group) & set(old)) for old in old_groups]
    most = max(shared, default=0)
    return shared.index(most) if most else None


def _but_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _follow(group: dict[str, Any], before: Mapping[str, Any], now: Mapping[str, Any]) -> float:
    """Let a group have the settings that somebody has changed.

    :returns: by what its rate is multiplied
    """
    factor = 1.0
    for name, value in now.items():
        if name not in before or before[name] == value:
            continue
        if name == "lr":
            factor = value / before["lr"] if before["lr"] else 1.0
            group["lr"] = group["lr"] * factor if before["lr"] else value
            if "initial_lr" in group:
                group["initial_lr"] = value
        elif name != "initial_lr":
            group[name] = list(value) if isinstance(group.get(name), list) else value
    return factor


@dataclass(frozen=True)
class FittedGroups:
    """What has become of the groups of an optimizer's state.

    :param begun: names of the parameters whose state begins anew
    :param sources: for each group, the one that it goes on from; ``None`` for a new one
    :param factors: for each group, by what its learning rate is multiplied; empty for none
    """

    begun: tuple[str, ...]
    sources: tuple[int | None, ...]
    factors: tuple[float, ...]

    def of_scheduler(self, state: Mapping[str, Any], present: Mapping[str, Any], groups: int) -> dict[str, Any]:
        """The state of a scheduler for these groups.

        :param state: as a checkpoint holds it
        :param present: that of the scheduler which is to have it
        :param groups: how many there were
        """
        fitted = dict(state)
        for name, values in state.items():
            if not isinstance(values, list) or len(values) != groups:
                continue
            own = present.get(name)
            fallback = own if isinstance(own, list) and len(own) == len(self.sources) else [None] * len(self.sources)
            made = [
                fallback[number] if source is None else values[source] for number, source in enumerate(self.sources)
            ]
            if name in ("base_lrs", "_last_lr"):
                made = [
                    value * factor if isinstance(value, float) else value
                    for value, factor in zip(made, self.factors or (1.0,) * len(made), strict=True)
                ]
            fitted[name] = made
        return fitted
