"""The weights of one moment, for whoever wants to look at a model while it is trained."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hivenb.errors import TrainingError
from hivenb.run.concurrent_runs import one_starts
from hivenb.run.model_copy import checked_device, copy_of, model_of, ready_to_predict
from hivenb.strategy.checks import run_that_trains

if TYPE_CHECKING:
    from torch import Tensor
    from torch import device as Device

    from hivenb.run.pause_and_stop import Stage


def take_snapshot(
    model: Any,
    stage: Stage,
    device: Any,
    timeout: float,
    *,
    is_training: bool,
    values_behind: Callable[[], Mapping[Tensor, Tensor]] = dict,
) -> Any:
    """Copy the model of a run at a moment at which nobody changes it.

    :param model: of the run
    :param stage: of the run
    :param device: of the copy
    :param timeout: seconds until that moment, at most
    :param is_training: whether the calling thread is the one that trains
    :param values_behind: gives, on the thread that trains, what parameters would have were the model not ahead of its
      optimizer: each peer is ahead by a step of its own, which is taken back later
    :returns: the copy, in eval mode and without gradients
    :raises TrainingError: if it cannot be copied, there is no such device, or no such moment came in time
    """
    place = checked_device(device)
    if is_training:
        return ready_to_predict(copy_of(model, place, values_behind()), place)
    until = time.monotonic() + timeout
    with stage.changed:
        request = _Request(model, place, values_behind)
        if is_active := stage.state.is_active:
            stage.hand_in(request.do)
    if is_active:
        return ready_to_predict(request.wait(until, timeout, stage), place)
    # so that it cannot begin meanwhile
    if not one_starts.acquire(timeout=max(0.0, until - time.monotonic())):
        raise TrainingError(f"another run has been starting for {timeout:g} s; try again, or give a longer timeout=")
    try:
        if stage.state.is_active:  # it has begun in between
            left = max(0.0, until - time.monotonic())
            return take_snapshot(model, stage, place, left, is_training=False, values_behind=values_behind)
        if (other := run_that_trains(model_of(model))) is not None:
            raise TrainingError(
                f"the run {other!r} trains this {type(model_of(model)).__name__} at the moment; take a snapshot of that"
            )
        return ready_to_predict(copy_of(model, place), place)
    finally:
        one_starts.release()


class _Request:
    """A copy that the training thread is to take between two batches.

    :param model: of the run
    :param device: of the copy
    :param values_behind: what parameters would have were the model not ahead
    """

    def __init__(self, model: Any, device: Device, values_behind: Callable[[], Mapping[Tensor, Tensor]]):
        self._model, self._device, self._values_behind = model, device, values_behind
        self._done = threading.Event()
        self._is_wanted = True
        self._made: Any = None
        self._error: BaseException | None = None

    def do(self) -> None:
        """Copy; on the training thread."""
        if not self._is_wanted:
            return
        try:
            self._made = copy_of(self._model, self._device, self._values_behind())
        except Exception as error:  # raised where it is waited for
            self._error = error
        self._done.set()

    def wait(self, until: float, timeout: float, stage: Stage) -> Any:
        """The copy.

        :param until: on the monotonic clock
        :raises TrainingError: if it cannot be taken, or was not in time
        """
        try:
            if not self._done.wait(max(0.0, until - time.monotonic())):
                raise TrainingError(
                    f"the run is {stage.state.value}, and within {timeout:g} s no batch has ended after which the "
                    "model could be copied: a batch, a round with other peers, or a validation takes longer. Give a "
                    "longer timeout="
                )
        finally:
            self._is_wanted = False
        if self._error is not None:
            raise self._error
        return self._made
