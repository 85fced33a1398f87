"""Errors of the user's own optimizer, hooks and schedulers, which end the training instead of being logged."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from hivemind.utils import get_logger

from hivenb.engine.averagers.staging import StagesState
from hivenb.errors import ProcessEndedError

logger = get_logger(__name__)


class FailsWithItsSteps(StagesState):
    """Mixin to put *before* hivemind's state averager: what goes wrong in a step is raised where training goes on.

    ``hivemind/optim/state_averager.py:_do`` logs it, and lets training go on with whatever is in the averaging buffers.

    A round of averaging that fails is no such error: it is missed. The parameters are then those of the last step that
    the optimizer has finished: an offloaded optimizer works on copies, of which only finished steps get into the model;
    otherwise the averaging buffers keep the parameters while a step is made, which costs no memory and, where the round
    before has left them there, no time. With local updates, a step for each batch, what a step has half done stays.
    """

    _failure: BaseException | None = None
    _is_settled = False
    _is_raised = False
    _is_held_back = False

    #: 1 while the epoch is counted and its step is still to be made; hivemind counts at once and makes the step later
    _steps_to_come = 0

    #: whether the optimizer is in the middle of a step, or was when that failed; guarded by ``lock_optimizer``
    _is_half_done = False

    #: how often each parameter was written to when the averaging buffers were the same
    _same_as_buffers: list[int] | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._parameters_are_kept = False
        self.finished_optimizer_step = _Finished(self._note)
        self.finished_averaging_round = _Finished(self._note)

    # -- the thread that trains ---------------------------------------------------------------------------------

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """As hivemind's.

        :raises Exception: what went wrong in this step, or in an earlier one that was made in the background
        """
        only_waits = {name for name, value in kwargs.items() if value} == {"wait_for_delayed_updates"}
        output = None
        if self._failure is None:
            if kwargs.get("increment_epoch") and kwargs.get("optimizer_step"):
                self._steps_to_come = 1
            output = super().step(*args, **kwargs)
        elif only_waits:
            super().step(*args, **{**kwargs, "apply_delayed_updates": False})
        self._raise_failure(only_waits)
        return output

    def _raise_failure(self, only_waits: bool) -> None:
        """Raise what went wrong in a step.

        :param only_waits: whether there is nothing to do but to wait for the background, as in the end. It is then
          raised if it was not before; the end of the averager's process never is, for which a successor waits
        """
        if self._failure is None or self._is_held_back:
            return
        is_known = self._is_raised or isinstance(self._failure, ProcessEndedError)
        if not self._is_settled:
            self._settle(self._failure)
        if not (only_waits and is_known):
            self._is_raised = True
            raise self._failure

    def _settle(self, failure: BaseException) -> None:
        """Have the model and the epoch of the last step that was finished, and say in the error which one that is."""
        self._is_settled = True
        is_made = not (self._is_half_done or self._steps_to_come)
        self.local_epoch -= self._steps_to_come
        self._steps_to_come = 0
        if self.offload_optimizer:
            self._apply_optimizer_parameters_()  # of a step that was finished before something else went wrong
        if sys.version_info >= (3, 11):
            failure.add_note(
                f"After the optimizer's step to epoch {self.local_epoch} of the swarm; the model has its result."
                if is_made
                else f"In the swarm's step to epoch {self.local_epoch + 1}; the model is as the step before left it."
            )

    @contextlib.contextmanager
    def failure_held_back(self) -> Iterator[None]:
        """Raise what goes wrong in the background meanwhile only when all else is done, such as ending processes."""
        self._is_held_back = True
        try:
            yield
        finally:
            self._is_held_back = False
        self._raise_failure(only_waits=True)

    # -- the thread that makes the step -------------------------------------------------------------------------

    def _do(self, wait_for_trigger: Callable[[], Any] | None, optimizer_step: bool, *args: Any, **kwargs: Any) -> None:
        try:
            if optimizer_step:
                self._parameters_are_kept = self._keep_parameters()
            super()._do(wait_for_trigger, optimizer_step, *args, **kwargs)
        except BaseException:  # of what is no Exception hivemind tells nobody, and they would wait for ever
            self.finished_optimizer_step.set()
            self.finished_averaging_round.set()

    def _note(self, error: BaseException) -> None:
        """Keep what is to be raised, and have the parameters as they were before a step that was not finished."""
        if self._failure is not None:
            return
        try:
            with self.lock_optimizer:
                self._undo_half_a_step()
        except Exception as e:
            logger.error(f"The parameters could not be put back to what they were before the step that failed: {e!r}")
        self._failure = error

    def _begin_step(self, *args: Any) -> None:
        """A hook of the optimizer, which it calls before it changes anything."""
        self._is_half_done = True

    def _update_scheduler(self) -> None:
        self._steps_to_come, self._is_half_done = 0, False  # hivemind comes here when the optimizer has made its step
        super()._update_scheduler()

    def _apply_averaging_results_(self) -> None:
        if self._failure is not None:
            return  # there are none: the buffers hold whatever was there before
        super()._apply_averaging_results_()
        if not self.delta_rule_averaging:
            self._same_as_buffers = None if self._has_changed_meanwhile else self._writes()

    def _keep_parameters(self) -> bool:
        """Have the parameters in the averaging buffers; whether they are there."""
        if self.offload_optimizer or self.reuse_tensors or self.finished_averaging_round.is_set():
            return False  # the model has them; or there are averages in the buffers that it does not have yet
        writes = self._writes()
        if writes != self._same_as_buffers:
            if not self._steps_to_come:
                return False
            with self.get_tensors() as buffers:
                self.copy_staged(self.main_parameters, buffers[: len(self.main_parameters)])  # statistics are behind
            self._same_as_buffers = writes
        return True

    @torch.no_grad()
    def _undo_half_a_step(self) -> None:
        """Put the parameters back, if a step has failed on its way; to be called with ``lock_optimizer`` held."""
        if not self._is_half_done:
            return
        if self.offload_optimizer:
            own = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            with self.lock_averaged_tensors if self.reuse_tensors else contextlib.nullcontext():
                for parameter, main in zip(own, self.main_parameters, strict=True):
                    parameter.copy_(main)
            self.forget_changes()
        elif self._parameters_are_kept:
            with self.get_tensors() as buffers:
                for main, buffer in zip(self.main_parameters, buffers, strict=False):
                    main.copy_(buffer)

    def _writes(self) -> list[int]:
        """How often each parameter was written to, as torch counts it."""
        return [parameter._version for parameter in self.main_parameters]


class _Finished(threading.Event):
    """What hivemind sets when a part of a step is over, also while it handles an error of it, which it then forgets.

    :param note: called with that error, before anybody else can know that the step is over
    """

    def __init__(self, note: Callable[[BaseException], None]):
        super().__init__()
        self._note = note

    def set(self) -> None:
        error = sys.exc_info()[1]
        if error is not None:
            self._note(error)
        super().set()
