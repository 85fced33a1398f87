"""From one optimizer to its successor with other settings, in the middle of an epoch, with nothing lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hivenb.engine.averaging.torch_optimizer_state import lay_out_like_parameters
from hivenb.engine.optimizer.delay_compensation import DelayCompensation
from hivenb.engine.optimizer.optimizer import Optimizer
from hivenb.engine.optimizer.skipped_batches import SkippedBatches
from hivenb.engine.optimizer.untrained_parameters import UntrainedParameters
from hivenb.engine.progress.tracker import ProgressTracker


@dataclass(frozen=True)
class Handover:
    """All that the successor of an optimizer goes on with. The swarm sees one peer throughout.

    :param tracker: which goes on reporting and reading the swarm's progress
    :param optimizer: the torch optimizer, with its state and settings
    :param parameters: of the model, in the groups of that optimizer
    :param scheduler: bound to that optimizer, or ``None``
    :param epoch: of the swarm
    :param gradients: the mean over the samples of the present epoch, one for each parameter; ``None``
      without any, and in place of one that no batch has used
    :param samples: that this peer has put into the present epoch
    :param has_begun: whether the peer takes part already
    :param skipped_batches: the count of the batches that were skipped
    :param outer: the state of the outer optimizer; ``None`` without one
    :param frozen: what of the given parameters is not trained
    :param compensation: with how gradients are clipped, and how long the last average was
    :param is_to_catch_up: whether the others have averaged gradients without this peer
    :param others_are_late: whether others average in the background what they have reported as ended
    """

    tracker: ProgressTracker
    optimizer: torch.optim.Optimizer
    parameters: tuple[tuple[torch.Tensor, ...], ...]
    scheduler: Any
    epoch: int
    gradients: tuple[torch.Tensor | None, ...] | None
    samples: int
    has_begun: bool
    skipped_batches: SkippedBatches
    outer: dict[str, Any] | None
    frozen: UntrainedParameters
    compensation: DelayCompensation
    is_to_catch_up: bool
    others_are_late: bool


def release(optimizer: Optimizer) -> Handover:
    """End an optimizer between two steps, all but its progress tracker, and keep what its successor needs."""
    optimizer.finish_delayed_updates()
    optimizer.rounds.leave()
    optimizer.state_averager.take_in_changes()
    averager = optimizer.grad_averager
    handover = Handover(
        tracker=optimizer.tracker,
        optimizer=optimizer.opt,
        parameters=tuple(tuple(group["params"]) for group in optimizer.param_groups),
        scheduler=optimizer.state_averager.scheduler,
        epoch=optimizer.local_epoch,
        gradients=None if averager is None else averager.mean_gradients(),
        samples=optimizer.local_progress.samples_accumulated,
        has_begun=optimizer.has_begun,
        skipped_batches=optimizer.skipped_batches,
        outer=None if (rounds := optimizer.state_averager.outer_rounds) is None else rounds.state(),
        frozen=optimizer.frozen,
        compensation=optimizer.compensation,
        is_to_catch_up=optimizer.is_to_catch_up,
        others_are_late=optimizer.others_are_late,
    )
    optimizer.compensation.forget()
    optimizer.end_averagers()
    return handover


def take_over(handover: Handover, make: Callable[..., Optimizer], *, offload: bool, **settings: Any) -> Optimizer:
    """Make the successor of an optimizer.

    :param handover: what :func:`release` gave; it can be taken over again if making the successor fails
    :param make: makes an optimizer from keyword arguments
    :param offload: whether the successor is to keep its state in host memory
    :param settings: its keyword arguments
    """
    groups = [
        {**group, "params": list(parameters)}
        for group, parameters in zip(handover.optimizer.param_groups, handover.parameters, strict=True)
    ]
    if offload:
        successor = make(
            tracker=handover.tracker,
            frozen=handover.frozen,
            optimizer=partial(rehome, handover.optimizer),
            params=groups,
            scheduler=lambda _: handover.scheduler,
            offload_optimizer=True,
            **settings,
        )
    else:
        successor = make(
            tracker=handover.tracker,
            frozen=handover.frozen,
            optimizer=rehome(handover.optimizer, groups),
            scheduler=handover.scheduler,
            offload_optimizer=False,
            **settings,
        )
    successor.skipped_batches = handover.skipped_batches
    successor.compensation = handover.compensation
    successor.go_on_at(handover.epoch)
    if successor.state_averager.outer_rounds is not None and handover.outer is not None:
        successor.state_averager.outer_rounds.take_over(handover.outer)
    if successor.grad_averager is not None and handover.gradients is not None:
        successor.grad_averager.set_mean_gradients(handover.gradients, handover.samples)
    if handover.has_begun:
        successor.take_part()
    if handover.is_to_catch_up:
        successor.fall_behind()
    successor.others_are_late = handover.others_are_late
    return successor


def give_back(optimizer: Optimizer, given: torch.optim.Optimizer | None) -> None:
    """Let a torch optimizer that was given, and may be used again, be as it was: with the model's own parameters.

    :param optimizer: one that has ended, which may have taken over the given one with copies in host memory
    :param given: by ``configure_optimizers``
    """
    optimizer.state_averager.let_go_of_optimizer()
    if given is not None and optimizer.opt is given:
        rehome(given, optimizer.param_groups, copies=False)  # a callback may have put averages into the model
        optimizer.frozen.put_back(given)


def rehome(
    optimizer: torch.optim.Optimizer, groups: Iterable[Mapping[str, Any]], copies: bool = True
) -> torch.optim.Optimizer:
    """Let a torch optimizer go on with other tensors, to which its parameters and state are moved.

    :param optimizer: keeps its settings, schedulers and hooks
    :param groups: parameter groups with as many tensors of the same shapes, maybe on another device
    :param copies: whether these get the values of its parameters
    :returns: the same optimizer
    """
    for own, given in zip(optimizer.param_groups, groups, strict=True):
        new_parameters = list(given["params"])
        for old, new in zip(own["params"], new_parameters, strict=True):
            if old is new:
                continue
            if copies:
                with torch.no_grad():
                    new.copy_(old)
            if old in optimizer.state:
                on_device = bool(own.get("fused") or own.get("capturable"))
                state = optimizer.state.pop(old)
                optimizer.state[new] = {name: _moved(name, value, old, new, on_device) for name, value in state.items()}
        own["params"] = new_parameters
    lay_out_like_parameters(optimizer)
    return optimizer


#: What torch's optimizers count by, for each parameter: numbers that stay in main memory, in their own type.
_COUNTS = frozenset({"step", "mu_product", "eta", "mu"})


def _moved(name: str, value: Any, old: torch.Tensor, new: torch.Tensor, on_device: bool) -> Any:
    if not torch.is_tensor(value):
        return value
    is_count = not value.dim() and (old.dim() > 0 or name in _COUNTS)  # a parameter can be a single number as well
    if value.shape == old.shape and value.is_floating_point() and not is_count:
        return value.to(device=new.device, dtype=new.dtype)
    return value.cpu() if is_count and not on_device else value.to(new.device)


# -- live settings ---------------------------------------------------------------------------------------------------
#
# Settings of an optimizer that can be changed while it trains, without making its averagers anew.


#: Attributes of averagers, by the settings that they are set by.
_ATTRIBUTES = {
    "allreduce_timeout": "_allreduce_timeout",
    "next_chunk_timeout": "next_chunk_timeout",
    "robust_aggregation": "robust_aggregation",
    "shutdown_timeout": "shutdown_timeout",
}

#: Settings that the averagers' own processes have to know.
_OF_AVERAGERS = frozenset(
    {*_ATTRIBUTES, "grad_compression", "load_state_compression", "matchmaking_time", "state_averaging_compression"}
)


def set_live(optimizer: Optimizer, settings: Mapping[str, Any]) -> None:
    """Change settings of an optimizer between two of its steps.

    :param optimizer: a living one
    :param settings: new values of keyword arguments of ``hivemind.Optimizer``, in the form in which it holds them; only
      of those that need no other averagers
    :raises TimeoutError: if the process of an averager does not answer
    """
    if any(name.startswith("delay_") for name in settings):
        optimizer.finish_delayed_updates()  # what runs in the background was begun under the old ones
    attributes = {_ATTRIBUTES[name]: value for name, value in settings.items() if name in _ATTRIBUTES}
    matchmaking, allreduce = {}, {}
    if "matchmaking_time" in settings:
        matchmaking["min_matchmaking_time"] = settings["matchmaking_time"]
    if "next_chunk_timeout" in settings:  # as hivemind/averaging/averager.py derives them
        timeout = settings["next_chunk_timeout"]
        allreduce = {"sender_timeout": timeout, "reducer_timeout": 2 * timeout}
    for averager, codec in (
        (optimizer.state_averager, "state_averaging_compression"),
        (optimizer.grad_averager, "grad_compression"),
    ):
        if averager is None or _OF_AVERAGERS.isdisjoint(settings):
            continue
        own, exchange = dict(attributes), dict(allreduce)
        if codec in settings:
            exchange["compression"] = settings[codec]
        if "grad_compression" in settings and optimizer.grad_averager is None:
            own["pseudo_gradient_compression"] = settings["grad_compression"]
        if "load_state_compression" in settings and averager is optimizer.state_averager:
            own["state_compression"] = settings["load_state_compression"]
        averager.set_live(attributes=own, matchmaking=matchmaking, allreduce=exchange)
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
