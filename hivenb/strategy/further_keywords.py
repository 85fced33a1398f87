"""The strategy's keywords beyond its documented signature: whose they are, read off hivemind's own signatures."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import hivemind
from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P

from hivenb.engine.dht.dht import DHT
from hivenb.errors import OptionsError
from hivenb.options.options import FIELDS
from hivenb.options.spelling import did_you_mean

#: What the strategy gives to hivemind's optimizer and to the DHT by itself.
_OPTIMIZERS_OWN = {"self", "dht", "optimizer", "params", "scheduler", "batch_size_per_step"}
_DHTS_OWN = {"self", "start", "p2p", "await_ready", "daemon", "record_validator", "host_maddrs", "args", "kwargs"}


@dataclass(frozen=True)
class SortedKeywords:
    """Keywords by who takes them: :class:`hivenb.Options`, ``hivemind.Optimizer`` alone, or the DHT."""

    options: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    dht: dict[str, Any] = field(default_factory=dict)


def sort_keywords(keywords: Mapping[str, Any]) -> SortedKeywords:
    """Sort keywords by who takes them.

    :param keywords: the ``**optimizer_kwargs`` of :class:`hivenb.HivemindStrategy`
    :raises OptionsError: if nobody knows one; the message lists those that somebody knows
    """
    result = SortedKeywords()
    homes = _homes()
    unknown = [name for name in keywords if name not in homes]
    if unknown:
        raise OptionsError(
            f"HivemindStrategy does not know {', '.join(map(repr, unknown))}. "
            f"{did_you_mean(unknown, [*homes, *FIELDS])}Beyond its documented parameters it takes "
            f"{', '.join(sorted(homes))}"
        )
    for name, value in keywords.items():
        getattr(result, homes[name])[name] = value
    return result


@cache
def _homes() -> dict[str, str]:
    dht = {
        name
        for function in (DHT.__init__, hivemind.DHT.__init__, DHTNode.create, P2P.create)
        for name in _names(function)
    }
    homes = dict.fromkeys(dht - _DHTS_OWN, "dht")
    homes |= dict.fromkeys(_names(hivemind.Optimizer.__init__) - _OPTIMIZERS_OWN, "optimizer")
    return homes | dict.fromkeys(FIELDS, "options")


def _names(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)
