"""Settings of an optimizer that can be changed while it trains, without making its averagers anew."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hivenb.engine.optimizer.optimizer import Optimizer

#: Keyword arguments of ``hivemind.Optimizer`` that :func:`set_live` takes.
LIVE_SETTINGS = frozenset(
    {
        "allreduce_timeout",
        "average_state_every",
        "averaging_timeout",
        "delay_grad_averaging",
        "delay_optimizer_step",
        "delay_state_averaging",
        "grad_compression",
        "load_state_compression",
        "load_state_timeout",
        "matchmaking_time",
        "next_chunk_timeout",
        "performance_ema_alpha",
        "robust_aggregation",
        "shutdown_timeout",
        "state_averaging_compression",
        "target_batch_size",
        "verbose",
    }
)

#: Those that the averagers' own processes have to know.
_OF_AVERAGERS = frozenset(
    {
        "allreduce_timeout",
        "grad_compression",
        "load_state_compression",
        "matchmaking_time",
        "next_chunk_timeout",
        "robust_aggregation",
        "shutdown_timeout",
        "state_averaging_compression",
    }
)


def set_live(optimizer: Optimizer, settings: Mapping[str, Any]) -> None:
    """Change settings of an optimizer between two of its steps.

    :param optimizer: a living one
    :param settings: new values of :data:`LIVE_SETTINGS`, in the form in which the optimizer holds them
    :raises TimeoutError: if the process of an averager does not answer
    """
    if any(name.startswith("delay_") for name in settings):
        optimizer.finish_delayed_updates()  # what runs in the background was begun under the old ones
    if _OF_AVERAGERS & set(settings):
        _set_in_averagers(optimizer, settings)
    for name, value in settings.items():
        if name == "verbose":
            level = logging.INFO if value else logging.DEBUG
            for part in (optimizer, optimizer.state_averager, optimizer.tracker):
                part.status_loglevel = level
        elif name == "performance_ema_alpha":
            optimizer.tracker.performance_ema.alpha = value
        elif name == "target_batch_size":
            optimizer.target_batch_size = optimizer.tracker.target_batch_size = value
        elif not name.endswith("_compression") and name != "robust_aggregation":
            setattr(optimizer, name, value)


def _set_in_averagers(optimizer: Optimizer, settings: Mapping[str, Any]) -> None:
    attributes: dict[str, Any] = {}
    matchmaking: dict[str, Any] = {}
    allreduce: dict[str, Any] = {}
    if "matchmaking_time" in settings:
        matchmaking["min_matchmaking_time"] = settings["matchmaking_time"]
    if "allreduce_timeout" in settings:
        attributes["_allreduce_timeout"] = settings["allreduce_timeout"]
    if "shutdown_timeout" in settings:
        attributes["shutdown_timeout"] = settings["shutdown_timeout"]
    if "robust_aggregation" in settings:
        attributes["robust_aggregation"] = settings["robust_aggregation"]
    if "next_chunk_timeout" in settings:
        timeout = attributes["next_chunk_timeout"] = settings["next_chunk_timeout"]
        # as hivemind/averaging/averager.py derives them
        allreduce |= {"sender_timeout": timeout, "reducer_timeout": 2 * timeout}
    for averager, codec in (
        (optimizer.state_averager, "state_averaging_compression"),
        (optimizer.grad_averager, "grad_compression"),
    ):
        if averager is None:
            continue
        own, exchange = dict(attributes), dict(allreduce)
        if codec in settings:
            exchange["compression"] = settings[codec]
        if "grad_compression" in settings and optimizer.grad_averager is None:
            own["pseudo_gradient_compression"] = settings["grad_compression"]
        if "load_state_compression" in settings and averager is optimizer.state_averager:
            own["state_compression"] = settings["load_state_compression"]
        averager.set_live(attributes=own, matchmaking=matchmaking, allreduce=exchange)
