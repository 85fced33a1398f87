"""Catching up: a peer that joins, or fell behind, takes over the state of the swarm."""

from __future__ import annotations

import time
from typing import Any

from hivemind.averaging import DecentralizedAverager
from hivemind.utils import get_logger

from hivenb.engine.optimizer.scheduled_rounds import SchedulesRounds
from hivenb.errors import SwarmError

logger = get_logger(__name__)

#: How often a peer that fell behind asks for the state before it gives up; hivemind itself never does.
LOAD_STATE_ATTEMPTS = 5

#: Seconds for which a peer downloads the state anew whenever an epoch has ended meanwhile.
CATCHING_UP = 60.0


class DownloadsState(SchedulesRounds):
    """Mixin to put *before* ``hivemind.Optimizer``: a download that fails ends, one that came too late is repeated."""

    #: when this peer began to download, if it has not ended an epoch since
    _behind_since: float | None = None

    def _should_load_state_from_peers(self) -> bool:
        return self.has_missed_a_round or self._has_fallen_behind or super()._should_load_state_from_peers()

    @property
    def has_missed_a_round(self) -> bool:
        """Whether the others have ended an epoch without this peer, which needs their state before it goes on."""
        # hivemind lets a peer that is one epoch behind the others take part in the round which they are about to end.
        # Where all wait for each other's gradients that round is over: this one would come to their next round, take
        # it for the last one, and have other moments than they from then on.
        if self.local_epoch >= self.tracker.global_epoch or self._cannot_catch_up:
            return False
        in_one_group = self.grad_averager is not None and not self.grad_averager.group_size_is_fixed
        return in_one_group and not (self.delay_grad_averaging or self.auxiliary)

    @property
    def is_catching_up(self) -> bool:
        """Whether this peer has the state of the swarm, and has ended no epoch with it yet."""
        return self._behind_since is not None

    @property
    def _cannot_catch_up(self) -> bool:
        """Whether epochs are shorter than a download."""
        return self._behind_since is not None and time.monotonic() - self._behind_since > CATCHING_UP

    @property
    def _has_gradient_state(self) -> bool:
        """Whether a newcomer has to know something of the gradients' averagers, as with PowerSGD.

        hivemind's peers download the last averages of any averager, and drop them.
        """
        load = getattr(type(self.grad_averager), "load_state_from_peers", None)
        return load not in (None, DecentralizedAverager.load_state_from_peers)

    def load_state_from_peers(self, **kwargs: Any) -> None:
        """Download parameters, optimizer state and epoch from the peer that is furthest ahead.

        :raises SwarmError: if no peer could be reached in several attempts
        """
        # Replaces the endless loop of hivemind/optim/optimizer.py:load_state_from_peers, which waits for the rounds
        # that this peer has agreed on before it has the state: one that looks for a group finds none any more.
        self._take_scheduled_rounds(wait=True)
        if self.has_missed_a_round and self.scheduled_grads is not None:
            self.scheduled_grads.cancel()
            self.scheduled_grads = None
        self.leave_rounds(wait=False)
        self.state_averager.give_up_searches()
        self.state_averager.step(wait_for_delayed_updates=True)
        self._behind_since = self._behind_since or time.monotonic()
        self._has_fallen_behind = False
        with self.tracker.pause_updates():
            self._download_state(**kwargs)
            is_behind = self.tracker.global_epoch - 1 <= self.local_epoch < self.tracker.global_epoch
            # with steps in the background all peers are one behind
            if is_behind and (self.delay_optimizer_step or self._cannot_catch_up):
                self.state_averager.local_epoch = self.tracker.global_epoch
            self._begin_epoch()

    def _download_state(self, **kwargs: Any) -> None:
        misfit: SwarmError | None = None
        last_error: Exception | None = None
        for attempt in range(LOAD_STATE_ATTEMPTS):
            try:
                self.state_averager.load_state_from_peers(timeout=self.load_state_timeout, **kwargs)
                if self._has_gradient_state:
                    self.grad_averager.load_state_from_peers(timeout=self.load_state_timeout, **kwargs)
                return
            except SwarmError as e:
                # it does not fit; but of what a peer of plain hivemind sends, the end may be lost, see stream_ends.py
                if misfit is not None:
                    raise
                logger.warning(f"The state of a peer does not fit; it is downloaded once more: {e}")
                misfit = last_error = e
            except Exception as e:
                logger.warning(f"Could not load the state from peers ({attempt + 1} of {LOAD_STATE_ATTEMPTS}): {e!r}")
                last_error = e
        raise SwarmError(
            f"This peer is at epoch {self.local_epoch} and the swarm at {self.tracker.global_epoch}, but the state "
            f"could not be downloaded in {LOAD_STATE_ATTEMPTS} attempts. Do all peers train the same model with the "
            "same optimizer?"
        ) from last_error

    def _begin_epoch(self) -> None:
        self.tracker.update_epoch(self.local_epoch)
        if not self.client_mode:
            self.state_averager.state_sharing_priority = self.local_epoch
        if self.grad_averager is not None:
            self.grad_averager.reset_accumulated_grads_()
            self.grad_averager.notify_used_averaged_gradients()  # those of a round that was missed
            if not self.client_mode:
                self.grad_averager.state_sharing_priority = self.local_epoch
