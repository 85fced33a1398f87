"""Rounds of averaging that are agreed on before they are due: with whom, and what becomes of those that fail."""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import hivemind
from hivemind.averaging.control import AveragingStage, StepControl
from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.utils import get_dht_time, get_logger

from hivenb.engine.rounds.averager import ANSWER_TIMEOUT
from hivenb.engine.rounds.expected_peers import AttendanceList, ExpectedPeers
from hivenb.engine.rounds.round import Round

logger = get_logger(__name__)

#: Seconds after which a peer that looks for others to average gradients with asks itself whether it was left out.
LEFT_OUT_AFTER = 1.0

#: Seconds after which it asks once more, as somebody may have begun to look at that moment.
ASK_AGAIN_AFTER = 0.5

#: Weight of a state that is not to count beside the others'. Not zero, by which it would be divided if they all died.
NEXT_TO_NOTHING = 1e-9


class MissedRound(Exception):
    """The others have ended an epoch whose gradients this peer was about to average with them."""


class SchedulesRounds(hivemind.Optimizer):
    """Mixin to put *before* ``hivemind.Optimizer``: each round is one of its epoch, and none is waited for in vain."""

    scheduled_grads: StepControl | None
    scheduled_state: StepControl | None

    #: peers in the last round of gradient averaging, this one included, and why it failed if it did
    _last_round: tuple[int, str | None] = (1, None)

    #: the newest epoch of another peer, and the oldest of those that can take part in rounds
    _newest_epoch, _oldest_epoch = 0, 0

    #: the round of state averaging that follows on that of gradients which is under way
    _state_round_to_come: StepControl | None = None

    #: whether the others have averaged gradients without this peer, in the background, so that it needs their state
    _has_fallen_behind = False

    def __init__(self, *args: Any, **kwargs: Any):
        self._scheduling: dict[str, Future[StepControl]] = {}
        self._attendance = AttendanceList()
        super().__init__(*args, **kwargs)

    def _see_swarm(self, reports: Sequence[LocalTrainingProgress], gone: frozenset[bytes]) -> None:
        """Let rounds follow what the others do. On the tracker's thread, also while this peer ends an epoch.

        :param reports: of the other peers that are there
        :param gone: ids of those that have gone without a goodbye
        """
        self._newest_epoch = newest = max((report.epoch for report in reports), default=0)
        present = self._attendance.call(reports)
        self._oldest_epoch = min((peer.epoch for peer in present), default=0)
        # one peer that has gone on alone draws nobody along but those who have nothing of their own yet
        over = newest if self.is_catching_up else self._oldest_epoch
        ahead_of_reports = {
            "state_averager": (self._state_rounds_ahead, 1),
            "grad_averager": (self._gradient_rounds_ahead, 0),
        }
        for name, (ahead, follows) in ahead_of_reports.items():
            averager = getattr(self, name, None)  # the tracker is at work before they are made
            if averager is not None:
                if not averager.group_size_is_fixed:
                    averager.give_up_searches(before=over + min(ahead, 0))
                if self.tracker.local_progress.epoch >= newest - 1:
                    averager.expect_peers(ExpectedPeers(present, gone, ahead, follows))

    @property
    def is_catching_up(self) -> bool:
        """Whether this peer has the state of the swarm, and has ended no epoch with it yet."""
        return False

    @property
    def _gradient_rounds_ahead(self) -> int:
        """By how much the number of a round is ahead of what its peers report while they look for each other."""
        return -1 if self.delay_grad_averaging else 0

    @property
    def _state_rounds_ahead(self) -> int:
        return 0 if self.delay_state_averaging or self.delay_optimizer_step else 1

    def _maybe_schedule_gradient_averaging(self) -> None:
        self._take_scheduled_rounds()
        if self.scheduled_grads is None and self._is_round_due:
            self._schedule_gradient_averaging()

    def _schedule_gradient_averaging(self) -> None:
        self._schedule("scheduled_grads", self.grad_averager, self.local_epoch)

    def _schedule(self, name: str, averager: Any, epoch: int | None) -> None:
        if name not in self._scheduling:
            # an averager's process takes up to 0.3 s until it has begun to look for a group
            self._scheduling[name] = _in_thread(
                partial(averager.schedule_step, gather=epoch, timeout=self.averaging_timeout)
            )

    def _take_scheduled_rounds(self, wait: bool = False) -> None:
        """Know of the rounds that were scheduled meanwhile, and no longer of those that were given up.

        :param wait: for those that are being scheduled
        :raises TimeoutError: if the process of an averager does not answer
        """
        for name, scheduling in list(self._scheduling.items()):
            if wait or scheduling.done():
                setattr(self, name, scheduling.result(ANSWER_TIMEOUT))
                del self._scheduling[name]
        for name in ("scheduled_grads", "scheduled_state"):
            control: StepControl | None = getattr(self, name)
            if control is not None and (control.triggered or control.done()):
                setattr(self, name, None)

    @property
    def _is_round_due(self) -> bool:
        """Whether it is time to look for a group, if there is anybody to be met, at the same epoch."""
        if not self.is_synchronized_with_peers():
            return False  # whoever has just come would look for a round that the others are in already
        eta = self.tracker.estimated_next_update_time - get_dht_time()
        return eta <= self.matchmaking_time and self.tracker.global_progress.num_peers > 1

    def _begin_averaging_gradients(self, grad_scaler: Any) -> bool:
        self._take_scheduled_rounds(wait=True)
        is_alone = self.tracker.global_progress.num_peers <= 1
        if is_alone and self.scheduled_grads is not None:
            # hivemind would do it, and load the local gradients by the way: twice divided, where they are reused
            self.scheduled_grads.cancel()
            self.scheduled_grads = None
        elif not is_alone and self.scheduled_grads is None:
            self._schedule_gradient_averaging()
            self._take_scheduled_rounds(wait=True)
        self._state_round_to_come = self.scheduled_state
        began: bool = super()._begin_averaging_gradients(grad_scaler)
        if not began:
            is_over = is_alone or self.grad_averager.has_retired
            self._last_round = (1, None if is_over else "given up before it began")
            # hivemind/optim/optimizer.py:_update_global_epoch would step with the gradients of the last batch alone
            self._load_local_gradients_into_optimizer()
        return began

    def _average_gradients_and_load_into_optimizer(self, maybe_step_control: StepControl | None) -> None:
        # Replaces the method of hivemind/optim/optimizer.py, which after a failed round loads the accumulators: they
        # were reset when the round began, and the optimizer would step with zeros. The averager's tensors hold this
        # peer's own gradients then, and averages in their place wherever those have arrived.
        is_left_out = maybe_step_control is not None and self._is_left_out(maybe_step_control)
        self._last_round = (1, None) if maybe_step_control is None else self._outcome(maybe_step_control)
        group_size, failed = self._last_round
        have_gone_on = self._newest_epoch > self.local_epoch and not self.grad_averager.group_size_is_fixed
        if failed and (have_gone_on or is_left_out):
            if have_gone_on and not self.delay_grad_averaging:
                raise MissedRound
            self._has_fallen_behind = True
            if self._state_round_to_come is not None:
                self._state_round_to_come.weight = NEXT_TO_NOTHING
        logger.log(self.status_loglevel, failed or f"Averaged gradients with {group_size} peers")
        self._load_averaged_gradients_into_optimizer_()

    def _is_left_out(self, control: Round) -> bool:
        """Wait until a round of gradients has a group, or is given up since the others have met without this peer.

        One that joins just then looks for them in vain, while they may wait for it: to average the state with them,
        which it does after the gradients, or to be ready for their next round.

        :returns: whether it was given up
        """
        if self.grad_averager.group_size_is_fixed:
            return False
        for _ in range(math.ceil(self.averaging_timeout / LEFT_OUT_AFTER)):
            if all(self._finds_nobody(control, seconds) for seconds in (LEFT_OUT_AFTER, ASK_AGAIN_AFTER)):
                return control.cancel()
            if control.stage is not AveragingStage.LOOKING_FOR_GROUP:
                break
        return False

    def _finds_nobody(self, control: Round, seconds: float) -> bool:
        """Whether, after so many seconds, a round has nobody yet though all who could come have looked for it."""
        with contextlib.suppress(Exception, concurrent.futures.CancelledError):  # is looked at by _outcome
            control.result(seconds)
        if control.stage is not AveragingStage.LOOKING_FOR_GROUP:
            return False
        state = self._state_round_to_come
        are_waiting = state is not None and state.stage is AveragingStage.AWAITING_TRIGGER
        is_over = self._oldest_epoch > control.epoch
        return (are_waiting or is_over) and bool(self.grad_averager.is_alone(control.epoch))

    def _outcome(self, control: StepControl) -> tuple[int, str | None]:
        """Wait for a round: how many peers were in it, and why it failed if it did.

        It has not if this peer or all others have left: then there was nobody to average with.
        """
        try:
            return len(control.result(self.averaging_timeout)), None
        except concurrent.futures.CancelledError:
            return 1, None if control.is_deserted else "given up: the others have gone on without this peer"
        except (TimeoutError, concurrent.futures.TimeoutError):
            if control.stage is not AveragingStage.RUNNING_ALLREDUCE:
                control.cancel()
            return 1, f"not done within averaging_timeout={self.averaging_timeout} s"
        except Exception as e:
            return 1, repr(e)

    def _maybe_schedule_state_averaging(self) -> None:
        # Replaces the method of hivemind/optim/optimizer.py, which never schedules a round: it wants to know first how
        # long those that were scheduled took to begin
        next_epoch = self.local_epoch + 1
        if next_epoch % self.average_state_every != 0 or self.state_averager.averaging_in_progress:
            return
        if self.scheduled_state is None and self._is_round_due:
            self._schedule("scheduled_state", self.state_averager, next_epoch)

    def _end_late_searches(self) -> None:
        """Give up what looks for a group since the last epoch, before the next one begins.

        A peer whose last round of state averaging is still under way takes part in no new one. Its peers would look for
        it until their timeout, and take part in none themselves, with nobody ever at the same epoch as another one.
        """
        self._take_scheduled_rounds(wait=True)
        if self.state_averager.give_up_searches(before=self.local_epoch + 1):
            self.state_averager.step(wait_for_delayed_updates=True)

    def leave_rounds(self, wait: bool = True) -> None:
        """Take part in none of the rounds that were agreed on.

        :param wait: until those that have a group already are over, in which this peer counts for nothing
        """
        self._take_scheduled_rounds(wait=True)
        left = [control for control in (self.scheduled_grads, self.scheduled_state) if control is not None]
        self.scheduled_grads = self.scheduled_state = None
        for control in left:
            if control.stage is AveragingStage.LOOKING_FOR_GROUP:
                control.cancel()
            elif not control.triggered and not control.done():
                control.weight = 0.0
                control.allow_allreduce()
        for control in left:
            if wait and not control.done():
                self._outcome(control)

    def retire(self) -> None:
        """Begin no further round of averaging, and wait for none that has no group yet. From any thread.

        To be called when training is about to end: the step that is under way then returns soon.
        """
        for averager in (self.state_averager, self.grad_averager):
            if averager is not None:
                averager.retire()


def _in_thread(call: Callable[[], StepControl]) -> Future[StepControl]:
    """What a call will give; an executor would wait for its threads at the end of the process."""
    future: Future[StepControl] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as e:
            future.set_exception(e)

    threading.Thread(target=run, name="schedule-round", daemon=True).start()
    return future
