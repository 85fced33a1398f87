"""Gradient averagers that can be born on any thread, and how those of a user's own choice become such."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hivemind.averaging import DecentralizedAverager
from hivemind.optim.grad_averager import GradientAverager as _GradientAverager
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager as _PowerSGDGradientAverager

from hivenb.engine.averagers.gradient_buffers import AccumulatesBySamples
from hivenb.engine.averagers.power_sgd import KeepsFewComponents
from hivenb.engine.averagers.state_download import DownloadsStates
from hivenb.engine.rounds.averager import AveragerBase
from hivenb.engine.rounds.fault_tolerant_all_reduce import FaultTolerantAllReduce
from hivenb.engine.rounds.tensor_parts import PartsCutAlike


class GradientAverager(AccumulatesBySamples, FaultTolerantAllReduce, PartsCutAlike, _GradientAverager, AveragerBase):
    """``hivemind``'s ``GradientAverager`` that can be created on any thread."""


class PowerSGDGradientAverager(
    AccumulatesBySamples,
    KeepsFewComponents,
    FaultTolerantAllReduce,
    PartsCutAlike,
    _PowerSGDGradientAverager,
    DownloadsStates,
):
    """``hivemind``'s ``PowerSGDGradientAverager`` that can be created on any thread."""


def own_factory(factory: Callable[..., Any] | None) -> Callable[..., Any]:
    """The same factory of a gradient averager, so that what it makes can be created on any thread.

    :param factory: a subclass of ``hivemind.optim.grad_averager.GradientAverager``, a ``functools.partial`` of one,
      or ``None`` for the default
    :raises TypeError: if it is neither; such a factory makes its averager start where we cannot reach it
    """
    if factory is None:
        return GradientAverager
    if isinstance(factory, partial):
        return partial(own_factory(factory.func), *factory.args, **factory.keywords)
    if not (isinstance(factory, type) and issubclass(factory, _GradientAverager)):
        raise TypeError(
            f"grad_averager_factory is {factory!r}; it must be a subclass of "
            "hivemind.optim.grad_averager.GradientAverager or a functools.partial of one, such as "
            "partial(PowerSGDGradientAverager, averager_rank=32)"
        )
    if issubclass(factory, AveragerBase):
        return factory
    mixins: tuple[type, ...] = (AccumulatesBySamples,)
    if issubclass(factory, _PowerSGDGradientAverager):
        mixins += (KeepsFewComponents,)
    is_without_state = _load_of(factory) is DecentralizedAverager.load_state_from_peers
    base = AveragerBase if is_without_state else DownloadsStates
    return type(factory.__name__, (*mixins, FaultTolerantAllReduce, PartsCutAlike, factory, base), {})


def has_state_of_its_own(averager: Any) -> bool:
    """Whether a newcomer has to know something of an averager of gradients, as of one for PowerSGD.

    hivemind's peers download the last averages of any averager, and drop them.

    :param averager: ``None`` with local updates
    """
    return _load_of(type(averager)) not in (None, DecentralizedAverager.load_state_from_peers)


def _load_of(kind: type) -> Any:
    return getattr(kind, "load_state_from_peers", None)
