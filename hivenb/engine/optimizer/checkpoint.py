"""What a checkpoint holds of an optimizer, and how it returns."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from hivenb.engine.averaging.state_averager import TrainingStateAverager
from hivenb.engine.averaging.torch_optimizer_state import (
    group_settings,
    initialize_optimizer_state,
    restore_group_settings,
)
from hivenb.engine.optimizer.catch_up import Participant

# -- epoch schedulers ------------------------------------------------------------------------------------------------
#
# Several learning rate schedulers as the one that hivemind moves.


class EpochSchedulers(LRScheduler):
    """Schedulers of one optimizer, which hivemind moves as one, a step for each swarm epoch.

    :param schedulers: each with its frequency, the number of swarm epochs between two of its steps, and the step
      after which it is moved no more; ``None`` for one without an end. A swarm makes more epochs than one peer had
      reckoned with
    :param stepping: the torch optimizer that makes the steps, where that is another one than the schedulers'. It has
      as many parameter groups; what they are set to is carried over, group by group, whenever the schedulers move
    """

    def __init__(
        self, schedulers: Iterable[tuple[Any, int, int | None]], stepping: torch.optim.Optimizer | None = None
    ):
        # without LRScheduler.__init__, which would set the rates once more
        self._schedulers = tuple(schedulers)
        self._stepping = stepping
        #: swarm epochs that these schedulers have been moved through
        self.epoch = 0

    @property
    def schedulers(self) -> tuple[Any, ...]:
        """The schedulers, as they were given."""
        return tuple(scheduler for scheduler, _, _ in self._schedulers)

    @property
    def frequencies(self) -> tuple[int, ...]:
        """For each of them, the number of swarm epochs between two of its steps."""
        return tuple(frequency for _, frequency, _ in self._schedulers)

    @property
    def ended_at(self) -> int | None:
        """The swarm epoch after which none of them moves; ``None`` if one goes on for ever."""
        ends = [None if end is None else end * frequency for _, frequency, end in self._schedulers]
        return None if None in ends else max(end for end in ends if end is not None)

    @property
    def optimizer(self) -> torch.optim.Optimizer:  # type: ignore[override]
        """The torch optimizer whose rates they set: the one that makes the steps."""
        return self._schedulers[0][0].optimizer if self._stepping is None else self._stepping

    @property
    def _step_count(self) -> int:  # type: ignore[override]
        """By this, hivemind/optim/state_averager.py:_update_scheduler sees how far it has to move them."""
        return self.epoch + 1

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Move them by one swarm epoch."""
        self.epoch += 1
        due = [scheduler for scheduler, frequency, end in self._schedulers if _is_due(self.epoch, frequency, end)]
        for scheduler in due:
            _note_step(scheduler.optimizer)
        if due and self._stepping is not None:
            _move_beside(self._stepping, due)
        else:
            for scheduler in due:
                scheduler.step()


def _is_due(epoch: int, frequency: int, end: int | None) -> bool:
    return epoch % frequency == 0 and (end is None or epoch // frequency <= end)


def _note_step(optimizer: Any) -> None:
    """Let schedulers know that an optimizer has stepped, which warn if it has not.

    Its steps are those of the swarm: another optimizer may make them, and others have made those that this peer has
    missed, or that came before its schedulers were made.
    """
    optimizer._opt_called = True
    optimizer._step_count = max(1, getattr(optimizer, "_step_count", 0))  # as torch before 2.4 calls it


def _move_beside(stepping: torch.optim.Optimizer, schedulers: Sequence[Any]) -> None:
    """Move schedulers whose optimizer never steps as if it were the one that does, and carry over what they set.

    They see the rates from which they go on, be they out of a checkpoint or set by hand, and the state.

    :param stepping: the optimizer that steps
    :param schedulers: at least one, all of one optimizer
    """
    own = schedulers[0].optimizer
    restore_group_settings(own, group_settings(stepping))
    state, own.state = own.state, _state_of(stepping, own)
    try:
        for scheduler in schedulers:
            scheduler.step()
    finally:
        own.state = state
    restore_group_settings(stepping, group_settings(own))


def _state_of(stepping: torch.optim.Optimizer, own: torch.optim.Optimizer) -> dict[Any, Any]:
    """The state of an optimizer, under the parameters of another one."""
    groups = zip(stepping.param_groups, own.param_groups, strict=True)
    pairs = (pair for group, other in groups for pair in zip(group["params"], other["params"], strict=True))
    known = {parameter: stepping.state[copied] for copied, parameter in pairs if copied in stepping.state}
    return defaultdict(dict, known)


# -- checkpoint ------------------------------------------------------------------------------------------------------


#: Under this name, beside the state of the torch optimizer, is what the swarm adds to it.
_OURS = "hivemind"


def optimizer_state(averager: TrainingStateAverager) -> dict[str, Any]:
    """The state of the torch optimizer, which plain torch can load, and the swarm epoch beside it.

    :param averager: of that state
    """
    with averager.lock_optimizer:
        own: dict[str, Any] = {"local_epoch": averager.local_epoch}
        if averager.outer_rounds is not None:
            own["outer_optimizer"] = averager.outer_rounds.state()
        return {**averager.optimizer.state_dict(), _OURS: own}


def epoch_of(state_dict: Mapping[str, Any]) -> int | None:
    """The swarm epoch that an optimizer's state is of; ``None`` if it says nothing, as that of a plain one.

    :param state_dict: what :func:`optimizer_state` gave
    """
    epoch: int | None = state_dict.get(_OURS, {}).get("local_epoch")
    return epoch


def epoch_to_go_on_at(checkpoint: Mapping[str, Any], frequencies: Iterable[int] = ()) -> int:
    """The swarm epoch at which training goes on from a file that a Trainer has written.

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
    """Be at the swarm epoch at which training goes on from a file of plain Lightning's.

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
    :returns: the swarm epoch that the state is of, if it says so; the averager is not at it yet
    """
    state = dict(state_dict)
    own = state.pop(_OURS, None)
    with averager.lock_optimizer, averager.lock_averaged_tensors:
        keeps_state = bool(averager.optimizer.state)
        averager.optimizer.load_state_dict(state)
        if keeps_state:
            initialize_optimizer_state(averager.optimizer)  # plain torch has none of what it has not stepped yet
    averager.share_statistics()
    reload_parameters(averager)
    if own is not None and averager.outer_rounds is not None and "outer_optimizer" in own:
        averager.outer_rounds.take_over(own["outer_optimizer"])
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
    if averager.outer_rounds is not None:
        averager.outer_rounds.begin_at_parameters()


# -- torch optimizers ------------------------------------------------------------------------------------------------
#
# Torch's optimizers: which of them hivemind can drive, and how to create another one like the one that is given.


def find_obstacle(optimizer: torch.optim.Optimizer, modules: Iterable[nn.Module], offloaded: bool) -> str | None:
    """Why hivemind cannot drive an optimizer, in words; ``None`` if it can.

    :param modules: of the model that it trains
    :param offloaded: whether it is to work on copies of the parameters in host memory
    """
    name = type(optimizer).__name__
    if not any(parameter.requires_grad for group in optimizer.param_groups for parameter in group["params"]):
        return (
            f"all parameters that {name} was given are frozen (requires_grad=False), so there is nothing to train; "
            "unfreeze those that are to be trained before training begins"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return (
            f"{name} computes the loss anew several times in each step (step() needs a closure), but the gradients of "
            "a step are averages over peers; use an optimizer that makes a step from one gradient, such as AdamW"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        return f"{name} needs sparse gradients, and peers average dense ones; use Adam"
    if not offloaded and any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse for m in modules):
        return "an embedding has sparse gradients, and peers average dense ones; create it with sparse=False"
    unknown = _arguments(optimizer)[1] if offloaded else []
    if unknown:
        return (
            f"with offload_optimizer=True, {name} is created anew for parameters in host memory, but its argument "
            f"{', '.join(unknown)} cannot be read off it; keep it in an attribute of the same name"
        )
    return None


def factory_like(optimizer: torch.optim.Optimizer) -> Callable[[Any], torch.optim.Optimizer]:
    """A factory of optimizers that are set up as this one is, for other parameters in the same groups.

    What is called before and after a step of this one is called at theirs.
    """
    arguments = _arguments(optimizer)[0]

    def make(param_groups: Any) -> torch.optim.Optimizer:
        made = type(optimizer)(param_groups, **arguments)
        for hook in optimizer._optimizer_step_pre_hooks.values():
            made.register_step_pre_hook(hook)
        for hook in optimizer._optimizer_step_post_hooks.values():
            made.register_step_post_hook(hook)
        return made

    return make


def _arguments(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], list[str]]:
    """What an optimizer was created with, as far as it tells, and the names of what has to be given and it does not."""
    arguments, unknown = {}, []
    for name, parameter in list(inspect.signature(type(optimizer)).parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in optimizer.defaults or hasattr(optimizer, name):
            arguments[name] = optimizer.defaults[name] if name in optimizer.defaults else getattr(optimizer, name)
        elif parameter.default is parameter.empty:
            unknown.append(name)
    return arguments, unknown
