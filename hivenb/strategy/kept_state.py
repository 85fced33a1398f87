"""The last good state of a training, kept in main memory, and how a peer returns to it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hivenb.engine.averaging.finite import are_finite
from hivenb.engine.optimizer.optimizer import Optimizer

if TYPE_CHECKING:
    from hivenb.engine.averaging.state_averager import TrainingStateAverager


class KeptState:
    """A copy of parameters, optimizer state and buffers in main memory; a new one is written over the one before.

    It is kept by position, not by tensor, so that an optimizer's successor can return to it, too. Learning rates and
    schedules are left as they are: they go on with the swarm epoch. For the thread that trains, but for
    :attr:`epoch`.
    """

    def __init__(self) -> None:
        #: the swarm epoch that the copy is of; ``None`` while there is none
        self.epoch: int | None = None
        #: names of the parameters that were trained then
        self.trained: tuple[str, ...] = ()
        self._tensors: dict[Any, torch.Tensor] = {}
        self._values: dict[Any, Any] = {}

    @torch.no_grad()
    def keep(self, optimizer: Optimizer, buffers: Mapping[str, torch.Tensor]) -> bool:
        """Take a copy of the present state, if all of it is finite and no step is under way in the background.

        :param optimizer: between two of its steps
        :param buffers: of the module, by their names
        :returns: whether it was taken; if not, the copy before is still there
        """
        averager = optimizer.state_averager
        if not averager.lock_optimizer.acquire(blocking=False):
            return False  # a step is under way in the background, and training does not wait for it
        try:
            tensors, values = _state_of(averager, buffers)
            if averager.is_in_a_step or not are_finite(_floats(tensors.values())):
                return False
            self.epoch = None  # until all is written
            self._tensors = {key: _copied(tensor, self._tensors.get(key)) for key, tensor in tensors.items()}
            self._values = copy.deepcopy(values)
            self.epoch = averager.epoch_of_parameters
        finally:
            averager.lock_optimizer.release()
        return True

    def forget(self) -> None:
        """Give the memory back."""
        self.epoch = None
        self._tensors, self._values = {}, {}

    def forget_unless(self, trained: tuple[str, ...]) -> None:
        """Forget what is of other parameters: those that are frozen by now, or no longer are, have no place in it.

        :param trained: names of the parameters that are trained now
        """
        if self.epoch is not None and self.trained != trained:
            self.forget()

    @torch.no_grad()
    def put_back(self, optimizer: Optimizer, buffers: Mapping[str, torch.Tensor]) -> None:
        """Give the model, its buffers and the torch optimizer what was kept of them.

        :param optimizer: of which nothing is under way in the background
        """
        averager = optimizer.state_averager
        with averager.lock_optimizer, averager.lock_averaged_tensors:
            present, _ = _state_of(averager, buffers)
            for key, kept in self._tensors.items():
                if key in present and present[key].shape == kept.shape:
                    present[key].copy_(kept)
            for (number, name), value in self._values.items():
                _state_by_number(averager)[number][name] = copy.deepcopy(value)
        averager.take_over_parameters()
        if averager.outer_rounds is not None:
            if ("anchor", 0) in self._tensors:
                averager.outer_rounds.outer.note_anchors()
            else:  # an outer optimizer is newer than what was kept
                averager.outer_rounds.begin_at_parameters()
        if optimizer.grad_averager is not None:
            _forget_left_over(optimizer.grad_averager)


def trained_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the parameters that a module trains."""
    return tuple(name for name, parameter in module.named_parameters() if parameter.requires_grad)


def roll_back(optimizer: Optimizer, kept: KeptState, buffers: Mapping[str, torch.Tensor], epoch: int) -> None:
    """Return to a state that was kept, and go on with it at a swarm epoch.

    What is under way in the background is finished first, and the samples of the present epoch are dropped.

    :param optimizer: between two of its steps, on the training thread
    :param kept: has a state
    :param buffers: of the module, by their names
    :param epoch: not before the present one. Peers at an earlier one download this peer's state, as from any other
      that is ahead of them
    """
    optimizer.finish_delayed_updates()
    optimizer.rounds.leave()
    optimizer.rounds.begin_anew()
    optimizer.state_averager.give_up_searches()
    with optimizer.tracker.pause_updates():
        kept.put_back(optimizer, buffers)
        optimizer.begin_epoch(epoch)
    optimizer.drop_gradients()
    optimizer.state_averager.move_schedulers()


def _state_of(
    averager: TrainingStateAverager, buffers: Mapping[str, torch.Tensor]
) -> tuple[dict[Any, torch.Tensor], dict[Any, Any]]:
    """All tensors of a training by what and where they are, and what else the optimizer knows of its parameters."""
    parameters = [parameter for group in averager.optimizer.param_groups for parameter in group["params"]]
    tensors: dict[Any, torch.Tensor] = dict(enumerate(parameters))
    tensors |= {("extra", number): tensor for number, tensor in enumerate(averager.extra_tensors)}
    tensors |= {("buffer", name): buffer for name, buffer in buffers.items()}
    if averager.outer is not None:
        tensors |= {("anchor", number): anchor for number, anchor in enumerate(averager.outer.anchors)}
        tensors |= {("moment", number): moment for number, moment in enumerate(averager.outer.moments)}
    values: dict[Any, Any] = {}
    for number, state in enumerate(_state_by_number(averager)):
        for name, value in state.items():
            (tensors if torch.is_tensor(value) else values)[number, name] = value
    return tensors, values


def _state_by_number(averager: TrainingStateAverager) -> list[dict[str, Any]]:
    optimizer = averager.optimizer
    return [optimizer.state.get(parameter, {}) for group in optimizer.param_groups for parameter in group["params"]]


def _floats(tensors: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    return (tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel())


def _copied(tensor: torch.Tensor, place: torch.Tensor | None) -> torch.Tensor:
    """A copy in main memory, in the place of an older one if that fits."""
    if place is None or place.shape != tensor.shape or place.dtype != tensor.dtype:
        place = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return place.copy_(tensor)


def _forget_left_over(averager: Any) -> None:
    """Drop what PowerSGD has left over of gradients that have led astray, and what it has learned of them in vain."""
    left_over, learned = getattr(averager, "_ms", ()), getattr(averager, "_qs", ())
    for tensor in chain(left_over, (one for one in learned if not are_finite([one]))):
        tensor.zero_()
