"""hivemind's optimizer for a thread of a notebook kernel: it ends epochs with whoever is there, and tells of them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import inspect
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import hivemind
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.optim.grad_scaler import GradScaler
from hivemind.utils import get_logger

from hivenb.engine.averaging.finite import are_finite, norm_of, where_not_finite
from hivenb.engine.averaging.gradient_averager import has_state_of_its_own, own_factory
from hivenb.engine.averaging.round import Round
from hivenb.engine.averaging.state_averager import TrainingStateAverager
from hivenb.engine.optimizer.catch_up import CatchingUp
from hivenb.engine.optimizer.checkpoint import optimizer_state, reload_parameters, restore_optimizer_state
from hivenb.engine.optimizer.delay_compensation import DelayCompensation
from hivenb.engine.optimizer.scheduled_rounds import AgreedRounds, EpochReport, MissedRound, RoundOutcome
from hivenb.engine.optimizer.skipped_batches import SkipsBatches
from hivenb.engine.optimizer.untrained_parameters import UntrainedParameters
from hivenb.engine.progress.tracker import ProgressTracker

logger = get_logger(__name__)

# -- deadlines -------------------------------------------------------------------------------------------------------
#
# For how long peers wait for each other in a round, unless they are told otherwise.


#: Seconds that a peer may take at least until its next piece of data arrives; it may still be in its last batch.
NEXT_CHUNK_TIMEOUT = 5.0

#: Share of ``next_chunk_timeout`` after which nobody waits for a peer that neither reports nor answers.
GONE_WITHIN = 0.75


def default_next_chunk_timeout(matchmaking_time: float) -> float:
    """Seconds for which a peer may be silent in a round unless it is chosen: what its last batch may take."""
    return max(matchmaking_time, NEXT_CHUNK_TIMEOUT)


# -- step clock ------------------------------------------------------------------------------------------------------
#
# How long training stands still in an optimizer's steps: all that they take besides the computing of gradients.


class StepClock:
    """Runs while a step does anything but compute gradients. For the training thread."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._running_since: float | None = None

    def __enter__(self) -> None:
        """Let it run, as for the time of a step."""
        self._running_since = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._hold()

    def paused(self, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """The same closure, which computes gradients, with the clock paused for it."""
        if closure is None:
            return None

        def computing() -> Any:
            self._hold()
            try:
                return closure()
            finally:
                self._running_since = time.perf_counter()

        return computing

    def restart(self) -> float:
        """Seconds for which it has run since the last time that it was asked."""
        is_running = self._running_since is not None
        self._hold()
        if is_running:
            self._running_since = time.perf_counter()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _hold(self) -> None:
        if self._running_since is not None:
            self._seconds += time.perf_counter() - self._running_since
            self._running_since = None


# -- optimizer -------------------------------------------------------------------------------------------------------


class Optimizer(SkipsBatches, hivemind.Optimizer):
    """``hivemind.Optimizer`` that can be created, used and shut down on any thread.

    Takes the parameters of ``hivemind.Optimizer``
    (https://learning-at-home.readthedocs.io/en/latest/modules/optim.html), and:

    :param delay_compensation: with ``delay_grad_averaging``, whether training goes on from a step with this peer's own
      gradients while they are averaged (see :mod:`hivenb.engine.optimizer.delay_compensation`)
    :param on_epoch: called with an :class:`EpochReport` on the training thread after each swarm epoch
    :param tracker: of a predecessor that was released (see :mod:`hivenb.engine.optimizer.handover`), to go on with
    :param frozen: what that one has taken out of its optimizer; by default what of the given parameters has
      ``requires_grad=False``
    """

    def __init__(
        self,
        *,
        dht: hivemind.DHT,
        client_mode: bool | None = None,
        delay_compensation: bool = True,
        on_epoch: Callable[[EpochReport], None] | None = None,
        averager_opts: dict[str, Any] | None = None,
        matchmaking_time: float = 5.0,
        next_chunk_timeout: float | None = None,
        tracker: ProgressTracker | None = None,
        optimizer: Any = None,
        params: Any = None,
        frozen: UntrainedParameters | None = None,
        **kwargs: Any,
    ):
        self._own_client_mode = dht.client_mode if client_mode is None else client_mode
        self._averager_opts = {"request_timeout": min(3.0, matchmaking_time / 2), **(averager_opts or {})}
        # begin() decides when, this one whether at all
        self._shares_state = bool(self._averager_opts.pop("allow_state_sharing", True))
        self._on_epoch = on_epoch
        self.delay_compensation = delay_compensation
        #: what makes up for gradients that are averaged in the background
        self.compensation = DelayCompensation()
        self._inherited_tracker = tracker
        self.has_begun = False
        self._is_trying, self._before_trial = False, (False, False)
        #: parameters that were given, and are no business of the swarm's
        self.frozen, params = (frozen, params) if frozen is not None else _without_frozen(optimizer, params)
        self._clock = StepClock()
        self._steps_with_own_gradients = False
        self._catching_up = CatchingUp(self)
        self.rounds = AgreedRounds(self, self._catching_up)
        try:
            # client_mode is given as a bool because hivemind/optim/optimizer.py:__init__ takes None the wrong way
            # round; _make_progress_tracker, the first to use it, puts the asked-for value back
            super().__init__(
                dht=dht,
                optimizer=optimizer,
                params=params,
                client_mode=False,
                averager_opts=self._averager_opts,
                matchmaking_time=matchmaking_time,
                # by default hivemind drops a peer whose last batch before a round takes longer than matchmaking_time
                next_chunk_timeout=next_chunk_timeout or default_next_chunk_timeout(matchmaking_time),
                **kwargs,
            )
            self.state_averager.wait_until_ready()
        except BaseException:
            self._abandon()
            if frozen is None and isinstance(optimizer, torch.optim.Optimizer):
                self.frozen.put_back(optimizer)
            raise
        self._inherited_tracker = None  # from now on it is this one's own
        self.defaults: dict[str, Any] = self.opt.defaults  # what torch's and Lightning's tools look at

    def _make_progress_tracker(self, target_batch_size: int, **kwargs: Any) -> ProgressTracker:
        self.client_mode = self._own_client_mode
        if (inherited := self._inherited_tracker) is not None:
            inherited.on_look = self.rounds.see_swarm
            inherited.target_batch_size, inherited.client_mode = target_batch_size, self.client_mode
            inherited.status_loglevel = self.status_loglevel
            inherited.set_live(**kwargs)
            return inherited
        kwargs.setdefault("private_key", getattr(self.dht, "private_key", None))
        return ProgressTracker(
            dht=self.dht,
            prefix=self.run_id,
            target_batch_size=target_batch_size,
            client_mode=self.client_mode,
            status_loglevel=self.status_loglevel,
            on_look=self.rounds.see_swarm,
            start=True,
            **kwargs,
        )

    def _make_state_averager(self, **kwargs: Any) -> TrainingStateAverager:
        averager = TrainingStateAverager(
            dht=self.dht,
            prefix=f"{self.run_id}_state_averager",
            min_matchmaking_time=self.matchmaking_time,
            allreduce_timeout=self.allreduce_timeout,
            shutdown_timeout=self.shutdown_timeout,
            offload_optimizer=self.offload_optimizer,
            custom_gradients=self.offload_optimizer,
            status_loglevel=self.status_loglevel,
            next_chunk_timeout=self.next_chunk_timeout,
            client_mode=self.client_mode,
            auxiliary=self.auxiliary,
            # not before a checkpoint had its chance to be loaded: a newcomer would take the state of epoch 0
            allow_state_sharing=False,
            start=False,
            **kwargs,
        )
        averager.run_in_background(await_ready=False)  # it begins to work while the other one is made
        return averager

    def _make_gradient_averager(self, factory: Callable[..., Any] | None, **kwargs: Any) -> Any:
        # hivemind hands averager_opts to the state averager alone, against its own documentation
        shared = {name: value for name, value in self._averager_opts.items() if name in _OPTIONS_OF_ALL_AVERAGERS}
        return super()._make_gradient_averager(own_factory(factory), allow_state_sharing=False, **{**kwargs, **shared})

    # -- taking part --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Take part from now on, with the state of the others if they are ahead.

        To be called when a checkpoint, if there is one, has been loaded, and before the first gradient is computed.

        :raises SwarmError: if the others are ahead and their state could not be downloaded in several attempts
        """
        self.catch_up()
        self.take_part()

    def catch_up(self) -> None:
        """Take over the state of the others, if they are ahead of this peer before it takes part; else do nothing.

        :raises SwarmError: if it could not be downloaded in several attempts
        """
        if not self.has_begun and self._catching_up.is_late():
            self.load_state_from_peers()

    def take_part(self) -> None:
        """Be on the swarm's list, and let peers that join download the state from here."""
        self.has_begun = True
        self.skipped_batches.note(True)
        self.tracker.announce()
        self.share_state(True)

    def share_state(self, shares: bool) -> None:
        """Let peers that join download the state from here, if this peer is one that does; or not for a while."""
        shares = shares and self._shares_state and not self.client_mode and not self.auxiliary
        self.state_averager.allow_state_sharing = shares
        if has_state_of_its_own(self.grad_averager):
            self.grad_averager.allow_state_sharing = shares

    def release_module(self, keep: bool = False) -> None:
        """Let callbacks have the module until :meth:`acquire_module`, and put other weights into it for a while.

        What is trained is what others download and average meanwhile.

        :param keep: copy what was trained into main memory, for others to download: the while may be long
        """
        if self.has_begun:
            self.state_averager.release_module(keep and self.state_averager.allow_state_sharing)

    def acquire_module(self) -> None:
        """The module is as training has left it: no callback has it any more."""
        self.state_averager.acquire_module()

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Accumulate the gradients of a batch, and end the swarm epoch if it is over; as ``hivemind`` does."""
        if self._is_trying:
            return self._step_by_itself(closure)
        self.tracker.is_waited_for = self.use_gradient_averaging and not self.delay_grad_averaging
        self.tracker.gone_after = GONE_WITHIN * self.next_chunk_timeout
        with self._clock:
            result = self.step_on_batch(self._clock.paused(closure), *args, **kwargs)
        self.skipped_batches.note(True)  # the step may have averaged or downloaded what the next batch must not spoil
        return result

    def _update_global_epoch(self, grad_scaler: Any) -> None:
        if self.auxiliary:
            # others wait for as many peers as are on the list, and a helper reports no samples that put it there
            self.tracker.announce()
            # with gradients averaged in the background, the others are one ahead and the round is about to begin
            if self.local_epoch < self.tracker.global_epoch + self.rounds.gradients_ahead:
                self._skip_missed_rounds()
                return
        if self._catching_up.has_missed_a_round:  # since it was looked at in this step
            self.load_state_from_peers()
            return
        self.rounds.note_who_is_ahead()
        if not self.settle() and not self.tracker.ready_to_update_epoch:
            return  # it was thought to be over by a batch that does not count
        samples = self.local_progress.samples_accumulated
        if not self.delay_grad_averaging:
            self.rounds.last = RoundOutcome()
        self.rounds.end_late_searches()
        try:
            self._end_epoch(grad_scaler)
        except MissedRound:
            self._catching_up.others_are_late = False
            self.load_state_from_peers()
            return
        self._catching_up.end()
        if self._on_epoch is not None:
            self._on_epoch(self.rounds.last.report(self.local_epoch, samples, self._clock.restart()))

    def _end_epoch(self, grad_scaler: GradScaler | None) -> None:
        """As hivemind ends it; but what peers average for an outer optimizer is weighed by their samples."""
        averager = self.state_averager
        if averager.outer_rounds is None:
            super()._update_global_epoch(grad_scaler)
            if self._compensates and self._steps_with_own_gradients and len(averager.pending_updates) == 1:
                averager.wait_for_step()  # which waits for nobody, unless a round of before is still under way
            return
        averager.outer_rounds.fragments.count(self.local_progress.samples_accumulated)
        averager.outer_rounds.every = self.average_state_every
        if self.scheduled_state is not None:
            self.scheduled_state.weight = averager.outer_rounds.weight(self.scheduled_state.epoch)
        was_alone = self.rounds.is_alone
        super()._update_global_epoch(grad_scaler)
        if was_alone and self.rounds.is_alone and self.local_epoch % self.average_state_every == 0:
            averager.step_outer_alone()

    def _skip_missed_rounds(self) -> None:
        """Go on with the others' epoch, as a helper that has come too late and has no state to catch up with."""
        self.rounds.leave(wait=False)  # those that have met are waiting for it
        with self.tracker.pause_updates():
            self.state_averager.local_epoch = self.tracker.global_epoch
            self.tracker.update_epoch(self.local_epoch)

    def _compute_schema_hash(self) -> int:
        # Leaves out the identity of an offloaded optimizer's gradients, of which some are set aside during its step
        groups = self.state_averager.optimizer.param_groups
        return hash(tuple(tuple(parameter.shape) for group in groups for parameter in group["params"]))

    #: called when the gradients of the model were taken away
    on_zero_grad: Callable[[], None] | None = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of the model; without effect where they are accumulated in place."""
        if self._is_trying:
            for parameter in self.state_averager.main_parameters:
                parameter.grad = None
        elif self.grad_averager is None or not self.grad_averager.reuse_grad_buffers:
            super().zero_grad(set_to_none)
            if self.on_zero_grad is not None:
                self.on_zero_grad()

    def drop_gradients(self) -> None:
        """Forget gradients that the model has and that no step has taken yet, as in the middle of an accumulation."""
        if self.grad_averager is None or not self.grad_averager.reuse_grad_buffers:  # which a new epoch resets
            super().zero_grad()
        if self.on_zero_grad is not None:
            self.on_zero_grad()

    def begin_epoch(self, epoch: int) -> None:
        """Be at a swarm epoch with nothing accumulated yet; to be called while the tracker is paused."""
        self.go_on_at(epoch)
        self.tracker.update_epoch(epoch)
        if self.grad_averager is not None:
            self.grad_averager.reset_accumulated_grads_()
            self.grad_averager.notify_used_averaged_gradients()  # those of a round that was missed

    def go_on_at(self, epoch: int) -> None:
        """Be at a swarm epoch, whose state the model and the optimizer have already."""
        self.state_averager.local_epoch = epoch
        for averager in (self.state_averager, self.grad_averager):
            if averager is not None and not self.client_mode:
                averager.state_sharing_priority = epoch

    def finish_delayed_updates(self) -> None:
        """Wait for the steps and rounds that run in the background, and apply them to the model."""
        self.settle()
        self.state_averager.step(wait_for_delayed_updates=True)
        while self.state_averager.pending_updates:  # each wait has a limit
            self.state_averager.step(wait_for_delayed_updates=True)
        self.state_averager.end_lead()  # of a step that was interrupted before it began

    @property
    def is_to_be_finished(self) -> bool:
        """Whether :meth:`finish_delayed_updates` is to be called before anybody looks at the model.

        Without a process that averages, too, if the model is ahead: rounds then fail at once.
        """
        return bool(self.is_alive() or self.state_averager.is_ahead)

    def values_behind(self) -> Mapping[torch.Tensor, torch.Tensor]:
        """What the model's parameters would have were it not ahead of the optimizer; empty while it is not.

        For the training thread. They are to be copied at once.
        """
        return self.state_averager.values_behind()

    def state_dict(self) -> dict[str, Any]:
        """The state of the wrapped torch optimizer, which plain torch can load, and this peer's epoch beside it."""
        return self.frozen.in_full(optimizer_state(self.state_averager))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, or the state of a plain torch optimizer of the same class."""
        self.finish_delayed_updates()
        self.rounds.leave()  # what has begun already is of the former state
        epoch = restore_optimizer_state(self.state_averager, self.frozen.of_trained(state_dict))
        if epoch is not None:
            with self.tracker.pause_updates():
                self.begin_epoch(epoch)

    # -- trials -------------------------------------------------------------------------------------------------

    def begin_trial(self) -> None:
        """Let each step be one of the torch optimizer with this peer's batch alone, until :meth:`end_trial`.

        Nobody hears of these steps or waits for this peer meanwhile, and epochs do not count them. What they do to the
        model and the torch optimizer stays: whoever tries something out puts them back.
        """
        if self._is_trying:
            return
        self.finish_delayed_updates()
        self._before_trial = bool(self.state_averager.allow_state_sharing), self._step_supports_amp_scaling
        self._step_supports_amp_scaling = False  # gradients that are summed in place stay scaled until an epoch ends
        self.share_state(False)
        if self.has_begun:
            self.step_aside()
        self._is_trying = True

    def end_trial(self) -> None:
        """Take part as before; to be called when the model and the torch optimizer are what they were."""
        if not self._is_trying:
            return
        self.zero_grad()
        self._is_trying = False
        shares, self._step_supports_amp_scaling = self._before_trial
        self.share_state(shares)

    def _step_by_itself(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.state_averager.step_by_itself()
        return loss

    # -- rounds -------------------------------------------------------------------------------------------------

    @property
    def scheduled_grads(self) -> Round | None:
        """The next round of gradients, as hivemind knows it."""
        return self.rounds.gradients.control

    @scheduled_grads.setter
    def scheduled_grads(self, control: Round | None) -> None:
        self.rounds.gradients.control = control

    @property
    def scheduled_state(self) -> Round | None:
        """The next round of the state, as hivemind knows it."""
        return self.rounds.state.control

    @scheduled_state.setter
    def scheduled_state(self, control: Round | None) -> None:
        self.rounds.state.control = control

    def _maybe_schedule_gradient_averaging(self) -> None:
        self.rounds.look_for_gradients()

    def _maybe_schedule_state_averaging(self) -> None:
        # hivemind's own never schedules one: it wants to know first how long those that were scheduled took to begin
        self.rounds.look_for_state()

    def _begin_averaging_gradients(self, grad_scaler: Any) -> bool:
        while self.state_averager.pending_updates and self.state_averager.is_a_step_behind:
            # each wait has a limit; a round under way would send what is written next in place of its own gradients
            self.state_averager.step(wait_for_delayed_updates=True)
        self.rounds.be_ready_for_gradients()
        compensates = self._compensates and not self.state_averager.pending_updates
        if compensates:
            self.state_averager.end_lead()  # of which the memory is written over
            self.compensation.begin()
            self.grad_averager.on_own_gradients = self.compensation.note_gradients
        else:
            self.compensation.forget()
            self.grad_averager.on_own_gradients = None
        began: bool = super()._begin_averaging_gradients(grad_scaler)
        self.rounds.begin_state_early()
        if not began:
            self.rounds.note_none_began()
            # hivemind/optim/optimizer.py:_update_global_epoch would step with the gradients of the last batch alone
            self._load_local_gradients_into_optimizer()
        elif compensates and not self.state_averager.has_begun_early:  # a round that writes to what would be led from
            self.compensation.speculate(self.state_averager)
        self._steps_with_own_gradients = not began
        return began

    @property
    def _compensates(self) -> bool:
        """Whether something is to make up for gradients that are averaged in the background."""
        return self.delay_compensation and self.delay_grad_averaging and not self.auxiliary

    def _average_gradients_and_load_into_optimizer(self, maybe_step_control: Round | None) -> None:
        # Replaces the method of hivemind/optim/optimizer.py, which after a failed round steps with zeros, as gradients
        # were reset when it began. The averager's tensors have this peer's own, and averages wherever those arrived.
        outcome = self.rounds.average_gradients(maybe_step_control)
        logger.log(self.status_loglevel, outcome.failed or f"Averaged gradients with {outcome.group_size} peers")
        length = self._load_averaged_gradients()
        if outcome.failed is None:
            self.compensation.note_average(length)

    def _load_averaged_gradients_into_optimizer_(self) -> None:
        self._load_averaged_gradients()

    def _load_averaged_gradients(self) -> float:
        """Let the optimizer have the gradients that it is to step with; returns their norm."""
        with self.grad_averager.get_tensors() as averaged:
            length = norm_of(averaged)
            where = None if math.isfinite(length) or are_finite(averaged) else where_not_finite(averaged)
        if where is not None:
            self.state_averager.leave_out_step()
            logger.warning(f"Epoch {self.local_epoch} ends without a step of the optimizer: {where}, as averaged")
        self._give_gradients()
        self.grad_averager.notify_used_averaged_gradients()
        return length

    def _give_gradients(self) -> None:
        # Replaces what hivemind/optim/optimizer.py:_load_averaged_gradients_into_optimizer_ does in the stream in which
        # the model computes, and with all parameters
        groups = self.state_averager.optimizer.param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        have_gradients = self.grad_averager.have_gradients()
        with self.grad_averager.get_tensors() as averaged:
            if self.offload_optimizer:  # which steps with the averaging buffers themselves
                for parameter, gradient, has_one in zip(parameters, averaged, have_gradients, strict=True):
                    parameter.grad = gradient if has_one else None
                return
            sources, targets = [], []
            for parameter, gradient, has_one in zip(parameters, averaged, have_gradients, strict=True):
                if not has_one:
                    parameter.grad = None
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                sources.append(gradient)
                targets.append(parameter.grad)
            self.grad_averager.staging.copy(sources, targets)

    # -- catching up --------------------------------------------------------------------------------------------

    def _should_load_state_from_peers(self) -> bool:
        if self._catching_up.is_called_for:
            return True
        if self._catching_up.may_follow:
            self._should_check_synchronization_on_update = False
        return super()._should_load_state_from_peers()

    def load_state_from_peers(self, **kwargs: Any) -> None:
        """Download parameters, optimizer state and epoch from the peer that is furthest ahead.

        :raises SwarmError: if no peer could be reached in several attempts
        """
        self._catching_up.take_over_state(**kwargs)

    def fall_behind(self) -> None:
        """Download the others' state before another batch counts, as one that has missed a round."""
        self._catching_up.was_excluded = True

    @property
    def is_to_catch_up(self) -> bool:
        """Whether the others' state is to be downloaded before another batch counts."""
        return self._catching_up.was_excluded

    @property
    def others_are_late(self) -> bool:
        """Whether others average gradients in the background, and report an epoch as ended before that."""
        return self._catching_up.others_are_late

    @others_are_late.setter
    def others_are_late(self, are_late: bool) -> None:
        self._catching_up.others_are_late = are_late

    def others_share_state(self) -> bool:
        """Whether other peers are there, from which the state can be downloaded; waits until they were looked at."""
        return self._catching_up.can_be_helped()

    def take_over_model(self) -> None:
        """Go on with the parameters that the model has now; to be called while nothing is under way."""
        reload_parameters(self.state_averager)

    # -- leaving ------------------------------------------------------------------------------------------------

    def retire(self) -> None:
        """Begin no further round of averaging, and wait for none that has no group yet. From any thread.

        To be called when training is about to end: the step that is under way then returns soon.
        """
        for averager in (self.state_averager, self.grad_averager):
            if averager is not None:
                averager.retire()

    def step_aside(self) -> None:
        """Leave the rounds that were agreed on and the swarm's list of peers until the next step, for a pause.

        Without it every group would wait for this peer until its deadline. What runs in the background is waited for:
        in a pause, people look at the model and change it, and nothing else should change it later.
        """
        if self.state_averager.pending_updates or self.state_averager.is_ahead:
            self.finish_delayed_updates()
        self.rounds.leave()
        self.tracker.step_aside()
        self.acquire_module()  # others may join during the pause

    def shutdown(self) -> None:
        """Apply what is still on its way, say goodbye to the swarm and end both averager processes."""
        # Replaces hivemind/optim/optimizer.py:shutdown, which ends one averager after the other, and cancels what is
        # cancelled: an error
        if self.state_averager.is_alive():
            try:
                self.tracker.shutdown(self.shutdown_timeout)
                with self.state_averager.failure_held_back():
                    try:
                        self.state_averager.step(wait_for_delayed_updates=True)
                        with contextlib.suppress(TimeoutError, concurrent.futures.TimeoutError):
                            self.rounds.leave()
                    finally:  # what has failed may do so once more, such as a device
                        self._end_processes()
            finally:
                self.state_averager.end_lead()  # of a step that has taken longer than it was waited for
        else:  # it was killed, or this is the second call
            self._abandon()

    def _abandon(self) -> None:
        """End what is still at work, without a word to anybody waited for."""
        tracker = getattr(self, "tracker", None)
        if tracker is not None and tracker is not self._inherited_tracker:
            tracker.shutdown(self.shutdown_timeout)
        if (state_averager := getattr(self, "state_averager", None)) is not None:
            state_averager.end_lead()
        self.end_averagers()

    def end_averagers(self) -> None:
        """End both averager processes, and let go of the torch optimizer and the tracker."""
        self._end_processes()
        state_averager = getattr(self, "state_averager", None)
        if state_averager is not None:
            state_averager.let_go_of_optimizer()

    def _end_processes(self) -> None:
        averagers = [getattr(self, "state_averager", None), getattr(self, "grad_averager", None)]
        made = [averager for averager in averagers if averager is not None]
        for averager in made:
            with contextlib.suppress(OSError):
                averager.ask_to_end()
        for averager in made:
            with contextlib.suppress(OSError):
                averager.shutdown()

    def __del__(self) -> None:
        """Nothing: Lightning's wrapper inherits this method, and would end the averagers of a living optimizer."""


def _without_frozen(optimizer: Any, params: Any) -> tuple[UntrainedParameters, Any]:
    """What of the parameters that an optimizer was given is not trained, and the others.

    :param optimizer: a torch optimizer, which has only the others afterwards; or a factory, if there are parameters
    :param params: parameters, or groups of them; ``None`` with a torch optimizer
    """
    if params is None:
        frozen = UntrainedParameters.among(getattr(optimizer, "param_groups", ()))
        if not frozen.are_none:
            frozen.take_out(optimizer)
        return frozen, None
    groups = list(params)
    if all(isinstance(one, torch.Tensor) for one in groups):
        groups = [{"params": groups}]
    frozen = UntrainedParameters.among(groups)
    return frozen, frozen.without(groups)


#: What ``averager_opts`` may hold for both averagers; all else is for the one that averages the state.
_OPTIONS_OF_ALL_AVERAGERS = frozenset({*inspect.signature(DecentralizedAverager).parameters, "robust_aggregation"})
