"""What an ``outer_optimizer`` stands for: by name, or by a class of ``torch.optim`` with its settings.

Imports torch only where it makes one, as the widgets need only names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hivenb.errors import OptionsError

#: That of DiLoCo (arXiv:2311.08105): SGD with Nesterov's momentum, in which the steps of the swarm add up.
NESTEROV = "nesterov"

#: Settings of that one.
_NESTEROV_SETTINGS: Mapping[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}

_HOME = "torch.optim"

#: Of the settings of one that another peer declares, a rate or a decay.
_LARGEST_NUMBER = 100.0


def describe_outer_optimizer(chosen: Any) -> Any:
    """An outer optimizer as plain values that can travel; one of the user's own, by where it is defined."""
    if chosen is None or isinstance(chosen, str):
        return chosen
    maker: Any = chosen
    settings: dict[str, Any] = {}
    while isinstance(maker, functools.partial):
        maker, settings = maker.func, {**maker.keywords, **settings}
    name, home = getattr(maker, "__qualname__", type(maker).__qualname__), str(getattr(maker, "__module__", ""))
    plain = all(isinstance(value, (bool, int, float, str)) for value in settings.values())
    if plain and home.startswith(f"{_HOME}."):
        return {"name": name, "settings": settings}
    return {"own": f"{home}.{name}", "settings": {key: repr(value)[:40] for key, value in settings.items()}}


def outer_optimizer(described: Any) -> Any:
    """The value of the option that :func:`describe_outer_optimizer` has described.

    :raises OptionsError: if this peer cannot make it by its name
    """
    if described is None or described == NESTEROV:
        return described
    name = described.get("name") if isinstance(described, dict) else None
    import torch

    kind = getattr(torch.optim, name, None) if isinstance(name, str) else None
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        own = described.get("own") if isinstance(described, dict) else described
        raise OptionsError(
            f"the swarm steps its parameters with {str(own)[:80]}, which is not torch's own: give this peer the same, "
            "with outer_optimizer=..."
        )
    settings = described.get("settings") or {}
    try:
        numbers = {name: value for name, value in settings.items() if isinstance(value, (int, float))}
        if beyond := [name for name, value in numbers.items() if not 0 <= value <= _LARGEST_NUMBER]:
            raise ValueError(f"{beyond[0]}={numbers[beyond[0]]!r} is below 0, or beyond {_LARGEST_NUMBER:g}")
        kind([torch.zeros(1, requires_grad=True)], **settings)
    except (AttributeError, TypeError, ValueError) as error:
        raise OptionsError(f"the swarm's outer optimizer, {name}, cannot be made: {error}") from error
    return functools.partial(kind, **settings) if settings else kind


def outer_optimizer_factory(chosen: str | Callable[..., Any] | None) -> Callable[..., Any] | None:
    """What makes the optimizer, from a list of parameters; ``None`` where there is none. Imports torch."""
    if not isinstance(chosen, str):
        return chosen
    import torch

    return functools.partial(torch.optim.SGD, **_NESTEROV_SETTINGS)


def wrong_outer_optimizer(values: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with it among some options, each with value and remedy."""
    chosen, fragments = values["outer_optimizer"], values["outer_fragments"]
    if isinstance(fragments, int) and fragments > 1:
        if chosen is None:
            yield (
                f"outer_fragments={fragments} without an outer_optimizer, which alone synchronizes a model in pieces: "
                f"set outer_optimizer={NESTEROV!r} as well, or leave it at 1."
            )
        if values["average_state_every"] != 1:
            yield (
                f"outer_fragments={fragments} with average_state_every={values['average_state_every']}: some pieces "
                "would never have their turn. Set average_state_every=1, and target_batch_size to as many samples as "
                "there should be between two exchanges."
            )
    if chosen is None:
        return
    shown = repr(chosen)[:60]
    if chosen != NESTEROV and (isinstance(chosen, str) or not callable(chosen)):
        yield (
            f"outer_optimizer={shown}: give {NESTEROV!r}, or what makes an optimizer from parameters, such as "
            "functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)."
        )
    if (values["averager_opts"] or {}).get("reuse_tensors") is True:
        yield (
            f"averager_opts['reuse_tensors']=True does not go with outer_optimizer={shown}: parameters and their "
            "differences cannot be in the same memory; drop one of them."
        )
