"""What an ``outer_optimizer`` stands for: by name, or by a class of ``torch.optim`` with its settings.

Imports torch only where it makes one, as the widgets need only names.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
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


# -- gradient averager choice ----------------------------------------------------------------------------------------
#
# What a ``grad_averager_factory`` stands for, told apart without calling it: which averager, with which settings.
#
# Imports neither torch nor hivemind, as the widgets need only names.


_PLAIN, _POWER_SGD = "GradientAverager", "PowerSGDGradientAverager"

#: Averagers of hivemind's that every peer can make by name.
_KNOWN = {_PLAIN: "hivemind.optim.grad_averager", _POWER_SGD: "hivemind.optim.power_sgd_averager"}


def describe_averager(factory: Callable[..., Any] | None) -> dict[str, Any] | None:
    """A gradient averager by name and settings; one that not every peer has, by where it is defined.

    :returns: plain values that can travel; ``None`` for the default
    """
    if factory is None:
        return None
    maker: Any = factory
    settings: dict[str, Any] = {}
    while isinstance(maker, functools.partial):
        maker, settings = maker.func, {**maker.keywords, **settings}
    name = getattr(maker, "__qualname__", type(maker).__qualname__)
    home = str(getattr(maker, "__module__", ""))
    plain = all(isinstance(value, (bool, int, float, str)) for value in settings.values())
    if plain and home == _KNOWN.get(name):
        return {"name": name, "settings": settings}
    return {"own": f"{home}.{name}", "settings": {key: repr(value)[:40] for key, value in settings.items()}}


def averager_factory(description: Any) -> Callable[..., Any] | None:
    """The factory that :func:`describe_averager` has described.

    :raises OptionsError: if it is none of hivemind's own
    """
    if description is None:
        return None
    name = description.get("name") if isinstance(description, dict) else None
    if name not in _KNOWN:
        own = description.get("own") if isinstance(description, dict) else description
        raise OptionsError(
            f"the swarm averages gradients with {own}, which is not hivemind's own: give this peer the same, with "
            "grad_averager_factory=..."
        )
    settings = description.get("settings")
    maker: Callable[..., Any] = getattr(import_module(_KNOWN[name]), name)
    return functools.partial(maker, **settings) if isinstance(settings, dict) and settings else maker


@dataclass(frozen=True)
class PowerSGD:
    """A gradient averager that sends large gradients as products of two thin matrices (arXiv:1905.13727).

    :param averager_rank: columns of each of the two
    :param min_compression_ratio: share of a gradient's numbers that this must save, or it is sent as it is
    """

    averager_rank: int
    min_compression_ratio: float = 0.5

    def factory(self) -> Callable[..., Any]:
        """For the option ``grad_averager_factory``; loads hivemind."""
        maker: Callable[..., Any] = getattr(import_module(_KNOWN[_POWER_SGD]), _POWER_SGD)
        given = {} if self == PowerSGD(self.averager_rank) else {"min_compression_ratio": self.min_compression_ratio}
        return functools.partial(maker, averager_rank=self.averager_rank, **given)

    def sent_sizes(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Numbers in each tensor that is sent for one gradient."""
        size = math.prod(shape)
        sides = list(shape)
        while len(sides) > 2:  # hivemind's matrix of a tensor: neighbours are merged, the smallest product first
            first = min(range(len(sides) - 1), key=lambda at: sides[at] * sides[at + 1])
            sides[first : first + 2] = [sides[first] * sides[first + 1]]
        thin = tuple(self.averager_rank * side for side in sides)
        saves_enough = len(sides) == 2 and size > 0 and 1 - sum(thin) / size >= self.min_compression_ratio
        return thin if saves_enough else (size,)


def power_sgd(factory: Callable[..., Any] | None) -> PowerSGD | None:
    """What a factory of PowerSGD averagers was told; ``None`` for any other one, or one that was told more."""
    description = describe_averager(factory)
    if description is None or description.get("name") != _POWER_SGD:
        return None
    try:
        return PowerSGD(**description["settings"])
    except TypeError:
        return None


def sent_sizes(shapes: Sequence[Sequence[int]], factory: Callable[..., Any] | None) -> tuple[int, ...] | None:
    """Numbers in each tensor that is sent for gradients.

    :param shapes: of the gradients
    :param factory: of their averager
    :returns: ``None`` where that cannot be told, as with an averager of the user's own
    """
    description = describe_averager(factory)
    if description is None or description.get("name") == _PLAIN:
        return tuple(math.prod(shape) for shape in shapes)
    told = power_sgd(factory)
    return None if told is None else tuple(size for shape in shapes for size in told.sent_sizes(shape))
