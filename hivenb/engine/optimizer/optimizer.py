"""hivemind's optimizer for a thread of a notebook kernel: tells what it does, and hands its state over."""

from __future__ import annotations

import concurrent.futures
import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hivemind
import torch
from hivemind.averaging import DecentralizedAverager

from hivenb.engine.averagers.gradient_averagers import own_factory
from hivenb.engine.averagers.state_averager import TrainingStateAverager
from hivenb.engine.optimizer.epoch_schedulers import EpochSchedulers
from hivenb.engine.optimizer.scheduled_rounds import MissedRound
from hivenb.engine.optimizer.state_download import DownloadsState
from hivenb.engine.optimizer.step_clock import StepClock
from hivenb.engine.progress.tracker import ProgressTracker

#: Seconds that a peer may take at least until its next piece of data arrives; it may still be in its last batch.
NEXT_CHUNK_TIMEOUT = 5.0

#: Share of ``next_chunk_timeout`` after which nobody waits for a peer that neither reports nor answers.
LOST_WITHIN = 0.75


def default_next_chunk_timeout(matchmaking_time: float) -> float:
    """Seconds for which a peer may be silent in a round unless it is chosen: what its last batch may take."""
    return max(matchmaking_time, NEXT_CHUNK_TIMEOUT)


@dataclass(frozen=True)
class EpochReport:
    """What one epoch of the swarm came to at this peer.

    :param epoch: the epoch that has just begun; also the number of global steps made so far
    :param samples: samples that this peer has put in
    :param group_size: peers that averaged gradients with this one, itself included; 1 when it was alone or the
      round failed. With ``delay_grad_averaging``, in the round before: this one has just begun
    :param seconds: for which this peer's training stood still since the epoch before: all that its steps took besides
      computing gradients, the transition to this epoch included
    :param failed: why the round of gradient averaging failed; ``None`` if it did not
    """

    epoch: int
    samples: int
    group_size: int
    seconds: float
    failed: str | None = None


class Optimizer(DownloadsState):
    """``hivemind.Optimizer`` that can be created, used and shut down on any thread.

    Takes the parameters of ``hivemind.Optimizer``
    (https://learning-at-home.readthedocs.io/en/latest/modules/optim.html), and:

    :param on_epoch: called with an :class:`EpochReport` on the training thread after each epoch of the swarm
    :param tracker: of a predecessor that was released (see :mod:`hivenb.engine.optimizer.handover`), to go on with
    """

    def __init__(
        self,
        *,
        dht: hivemind.DHT,
        client_mode: bool | None = None,
        on_epoch: Callable[[EpochReport], None] | None = None,
        averager_opts: dict[str, Any] | None = None,
        matchmaking_time: float = 5.0,
        next_chunk_timeout: float | None = None,
        tracker: ProgressTracker | None = None,
        **kwargs: Any,
    ):
        self._own_client_mode = dht.client_mode if client_mode is None else client_mode
        self._averager_opts = {"request_timeout": min(3.0, matchmaking_time / 2), **(averager_opts or {})}
        # begin() decides when, this one whether at all
        self._shares_state = bool(self._averager_opts.pop("allow_state_sharing", True))
        self._on_epoch = on_epoch
        self._inherited_tracker = tracker
        self.has_begun = False
        self._clock = StepClock()
        try:
            # client_mode is given as a bool because hivemind/optim/optimizer.py:__init__ takes None the wrong way
            # round; _make_progress_tracker, the first to use it, puts the asked-for value back
            super().__init__(
                dht=dht,
                client_mode=False,
                averager_opts=self._averager_opts,
                matchmaking_time=matchmaking_time,
                # by default hivemind drops a peer whose last batch before a round takes longer than matchmaking_time
                next_chunk_timeout=next_chunk_timeout or default_next_chunk_timeout(matchmaking_time),
                **kwargs,
            )
        except BaseException:
            self._abandon()
            raise
        self._inherited_tracker = None  # from now on it is this one's own
        self.defaults: dict[str, Any] = self.opt.defaults  # what torch's and Lightning's tools look at

    def _make_progress_tracker(self, target_batch_size: int, **kwargs: Any) -> ProgressTracker:
        self.client_mode = self._own_client_mode
        if (inherited := self._inherited_tracker) is not None:
            inherited.on_look = self._see_swarm
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
            on_look=self._see_swarm,
            start=True,
            **kwargs,
        )

    def _make_state_averager(self, **kwargs: Any) -> TrainingStateAverager:
        return TrainingStateAverager(
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
            start=True,
            **kwargs,
        )

    def _make_gradient_averager(self, factory: Callable[..., Any] | None, **kwargs: Any) -> Any:
        # hivemind hands averager_opts to the state averager alone, against its own documentation
        shared = {name: value for name, value in self._averager_opts.items() if name in _OPTIONS_OF_ALL_AVERAGERS}
        return super()._make_gradient_averager(own_factory(factory), allow_state_sharing=False, **{**kwargs, **shared})

    def begin(self) -> None:
        """Take part from now on: be on the swarm's list, and let peers that join download the state from here.

        To be called when a checkpoint, if there is one, has been loaded.
        """
        self.has_begun = True
        self.tracker.announce()
        if self._shares_state and not self.client_mode and not self.auxiliary:
            self.state_averager.allow_state_sharing = True
            if self._has_gradient_state:
                self.grad_averager.allow_state_sharing = True

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Accumulate the gradients of a batch, and end the epoch of the swarm if it is over; as ``hivemind`` does."""
        self.tracker.is_waited_for = self.use_gradient_averaging and not self.delay_grad_averaging
        self.tracker.lost_after = LOST_WITHIN * self.next_chunk_timeout
        with self._clock.running():
            return super().step(self._clock.paused(closure), *args, **kwargs)

    def _update_global_epoch(self, grad_scaler: Any) -> None:
        if self.auxiliary:
            # others wait for as many peers as are on the list, and a helper reports no samples that put it there
            self.tracker.announce()
            # with gradients averaged in the background, the others are one ahead and the round is about to begin
            if self.local_epoch < self.tracker.global_epoch + self._gradient_rounds_ahead:
                self._skip_missed_rounds()
                return
        if self.has_missed_a_round:  # since it was looked at in this step
            self.load_state_from_peers()
            return
        samples = self.local_progress.samples_accumulated
        if not self.delay_grad_averaging:
            self._last_round = (1, None)
        self._end_late_searches()
        try:
            super()._update_global_epoch(grad_scaler)
        except MissedRound:
            self.load_state_from_peers()
            return
        self._behind_since = None
        if self._on_epoch is not None:
            group_size, failed = self._last_round
            self._on_epoch(
                EpochReport(self.local_epoch, samples, group_size, self._clock.restart(), failed),
            )

    def _skip_missed_rounds(self) -> None:
        """Go on with the others' epoch, as a helper that has come too late and has no state to catch up with."""
        self.leave_rounds(wait=False)  # those that have met are waiting for it
        with self.tracker.pause_updates():
            self.state_averager.local_epoch = self.tracker.global_epoch
            self.tracker.update_epoch(self.local_epoch)

    def _compute_schema_hash(self) -> int:
        # Leaves out the identity of an offloaded optimizer's gradients, of which some are set aside during its step
        groups = self.state_averager.optimizer.param_groups
        return hash(tuple(tuple(parameter.shape) for group in groups for parameter in group["params"]))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of the model; without effect where they are accumulated in place."""
        if self.grad_averager is None or not self.grad_averager.reuse_grad_buffers:
            super().zero_grad(set_to_none)

    def step_aside(self) -> None:
        """Leave the rounds that were agreed on and the swarm's list of peers until the next step, for a pause.

        Without it every group would wait for this peer until its deadline.
        """
        self.leave_rounds()
        self.tracker.step_aside()

    def go_on_at(self, epoch: int) -> None:
        """Be at an epoch of the swarm, whose state the model and the optimizer have already."""
        self.state_averager.local_epoch = epoch
        for averager in (self.state_averager, self.grad_averager):
            if averager is not None and not self.client_mode:
                averager.state_sharing_priority = epoch

    def finish_delayed_updates(self) -> None:
        """Wait for the steps and rounds that run in the background, and apply them to the model."""
        self.state_averager.step(wait_for_delayed_updates=True)
        while self.state_averager.pending_updates:  # each wait has a limit
            self.state_averager.step(wait_for_delayed_updates=True)

    def state_dict(self) -> dict[str, Any]:
        """The state of the wrapped torch optimizer, which plain torch can load, and this peer's epoch beside it."""
        with self.state_averager.lock_optimizer:
            return {**self.opt.state_dict(), "hivemind": {"local_epoch": self.local_epoch}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, or the state of a plain torch optimizer of the same class."""
        state = dict(state_dict)
        own = state.pop("hivemind", None)
        self.finish_delayed_updates()
        with self.state_averager.lock_optimizer, self.state_averager.lock_averaged_tensors:
            self.opt.load_state_dict(state)
            self._reload_parameters()
        if own is None:
            return
        with self.tracker.pause_updates():
            self.state_averager.local_epoch = own["local_epoch"]
            if isinstance(scheduler := self.state_averager.scheduler, EpochSchedulers):
                scheduler.epoch = own["local_epoch"]  # whoever restores the optimizer restores its schedulers, too
            self.tracker.update_epoch(own["local_epoch"])
            self._begin_epoch()

    @torch.no_grad()
    def _reload_parameters(self) -> None:
        """Take the model's parameters over into the offloaded copy, which was made before they were restored."""
        if not self.offload_optimizer:
            return
        offloaded = [p for group in self.opt.param_groups for p in group["params"]]
        for own, main in zip(offloaded, self.state_averager.main_parameters, strict=True):
            own.copy_(main)

    def shutdown(self) -> None:
        """Apply what is still on its way, say goodbye to the swarm and end both averager processes."""
        if self.state_averager.is_alive():
            # hivemind/optim/optimizer.py:shutdown cancels a round that was cancelled already, which is an error
            with contextlib.suppress(TimeoutError, concurrent.futures.TimeoutError):
                self._take_scheduled_rounds(wait=True)
            super().shutdown()
        else:  # it was killed, or this is the second call
            self._abandon()

    def _abandon(self) -> None:
        """End what is still at work, without a word to anybody waited for."""
        tracker = getattr(self, "tracker", None)
        if tracker is not None and tracker is not self._inherited_tracker:
            tracker.shutdown(self.shutdown_timeout)
        self.end_averagers()

    def end_averagers(self) -> None:
        """End both averager processes, and let go of the torch optimizer and the tracker."""
        state_averager = getattr(self, "state_averager", None)
        for averager in (state_averager, getattr(self, "grad_averager", None)):
            if averager is not None and averager.is_alive():
                with contextlib.suppress(OSError):
                    averager.shutdown()
        if state_averager is not None:
            state_averager.let_go_of_optimizer()

    def __del__(self) -> None:
        """Nothing: Lightning's wrapper inherits this method, and would end the averagers of a living optimizer."""


#: What ``averager_opts`` may hold for both averagers; all else is for the one that averages the state.
_OPTIONS_OF_ALL_AVERAGERS = frozenset(inspect.signature(DecentralizedAverager).parameters)
