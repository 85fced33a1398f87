"""What a checkpoint holds of an optimizer, and how it returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hivenb.engine.averagers.state_averager import TrainingStateAverager
from hivenb.engine.optimizer.epoch_schedulers import EpochSchedulers

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


def restore_optimizer_state(averager: TrainingStateAverager, state_dict: Mapping[str, Any]) -> int | None:
    """Load what :func:`optimizer_state` gave, or the state of a plain torch optimizer of the same class.

    :param averager: of that state, which nothing in the background is about to change
    :returns: the epoch of the swarm that the state is of, if it says so; the averager is not at it yet
    """
    state = dict(state_dict)
    own = state.pop(_OURS, None)
    with averager.lock_optimizer, averager.lock_averaged_tensors:
        averager.optimizer.load_state_dict(state)
        if averager.offload_optimizer:
            _reload_parameters(averager)
    averager.begin_at_parameters()
    if own is not None and averager.outer is not None and "outer_optimizer" in own:
        averager.outer.take_over(own["outer_optimizer"])
    if own is None:
        return None
    epoch: int = own["local_epoch"]
    if isinstance(averager.scheduler, EpochSchedulers):
        averager.scheduler.epoch = epoch  # whoever restores the optimizer restores its schedulers, too
    return epoch


@torch.no_grad()
def _reload_parameters(averager: TrainingStateAverager) -> None:
    """Take the model's parameters over into the offloaded copy, which was made before they were restored."""
    offloaded = [p for group in averager.optimizer.param_groups for p in group["params"]]
    for own, main in zip(offloaded, averager.main_parameters, strict=True):
        own.copy_(main)
