"""What a checkpoint holds of an optimizer, and how it returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain, repeat
from typing import Any

import torch

from hivenb.engine.averagers.state_averager import TrainingStateAverager
from hivenb.engine.averagers.torch_optimizer_state import initialize_optimizer_state
from hivenb.engine.optimizer.epoch_schedulers import EpochSchedulers
from hivenb.engine.optimizer.participant import Participant

#: Under this name, beside the state of the torch optimizer, is what the swarm adds to it.
_OURS = "hivemind"


def optimizer_state(averager: TrainingStateAverager) -> dict[str, Any]:
    """The state of the torch optimizer, which plain torch can load, and the epoch of the swarm beside it.

    :param averager: of that state
    """
    with averager.lock_optimizer:
        own: dict[str, Any] = {"local_epoch": averager.local_epoch}
        if averager.outer is not None:
            own["outer_optimizer"] = averager.outer.state()
        return {**averager.optimizer.state_dict(), _OURS: own}


def epoch_of(state_dict: Mapping[str, Any]) -> int | None:
    """The epoch of the swarm that an optimizer's state is of; ``None`` if it says nothing, as that of a plain one.

    :param state_dict: what :func:`optimizer_state` gave
    """
    epoch: int | None = state_dict.get(_OURS, {}).get("local_epoch")
    return epoch


def epoch_to_go_on_at(checkpoint: Mapping[str, Any], frequencies: Iterable[int] = ()) -> int:
    """The epoch of the swarm at which training goes on from a file that a Trainer has written.

    One of plain Lightning's has none: then it is that of its schedulers, so that whoever joins has the same rates;
    and never the first, in which whoever joins downloads nothing, and averages untrained weights into the file's.

    :param checkpoint: what the file holds, with the state of one optimizer
    :param frequencies: of its schedulers, as :class:`EpochSchedulers` has them; by default 1
    """
    for state in checkpoint["optimizer_states"]:
        if (epoch := epoch_of(state)) is not None:
            return epoch
    return max(1, _epoch_of_schedulers(checkpoint, frequencies))


def go_on_from_plain(optimizer: Participant, checkpoint: Mapping[str, Any]) -> None:
    """Be at the epoch of the swarm at which training goes on from a file of plain Lightning's.

    :param optimizer: which has the state in it by now, and does not take part yet
    :param checkpoint: what the file holds
    """
    scheduler = optimizer.state_averager.scheduler
    frequencies = () if scheduler is None else scheduler.frequencies
    with optimizer.tracker.pause_updates():
        optimizer.begin_epoch(epoch_to_go_on_at(checkpoint, frequencies))
    if scheduler is not None:
        scheduler.epoch = _epoch_of_schedulers(checkpoint, frequencies)  # where Lightning restores them to


def _epoch_of_schedulers(checkpoint: Mapping[str, Any], frequencies: Iterable[int]) -> int:
    moved = zip(checkpoint.get("lr_schedulers", ()), chain(frequencies, repeat(1)), strict=False)
    return max((int(state.get("last_epoch", 0)) * frequency for state, frequency in moved), default=0)


def restore_optimizer_state(averager: TrainingStateAverager, state_dict: Mapping[str, Any]) -> int | None:
    """Load what :func:`optimizer_state` gave, or the state of a plain torch optimizer of the same class.

    :param averager: of that state, which nothing in the background is about to change
    :returns: the epoch of the swarm that the state is of, if it says so; the averager is not at it yet
    """
    state = dict(state_dict)
    own = state.pop(_OURS, None)
    with averager.lock_optimizer, averager.lock_averaged_tensors:
        keeps_state = bool(averager.optimizer.state)
        averager.optimizer.load_state_dict(state)
        if keeps_state:
            initialize_optimizer_state(averager.optimizer)  # plain torch has none of what it has not stepped yet
    reload_parameters(averager)
    if own is not None and averager.outer is not None and "outer_optimizer" in own:
        averager.outer.take_over(own["outer_optimizer"])
    if own is None:
        return None
    epoch: int = own["local_epoch"]
    if isinstance(averager.scheduler, EpochSchedulers):
        averager.scheduler.epoch = epoch  # whoever restores the optimizer restores its schedulers, too
    return epoch


@torch.no_grad()
def reload_parameters(averager: TrainingStateAverager) -> None:
    """Take the model's parameters over into the offloaded copy, which was made before they were changed."""
    if averager.offload_optimizer:
        with averager.lock_optimizer, averager.lock_averaged_tensors:
            offloaded = [p for group in averager.optimizer.param_groups for p in group["params"]]
            for own, main in zip(offloaded, averager.main_parameters, strict=True):
                own.copy_(main)
    averager.forget_changes()
    averager.begin_at_parameters()
