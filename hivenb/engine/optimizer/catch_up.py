"""Catching up: a peer that joins, or fell behind, takes over the state of the swarm."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from hivemind.p2p import PeerID
from hivemind.utils import get_logger

from hivenb.engine.averaging.gradient_averager import has_state_of_its_own
from hivenb.engine.network.dht import require_invited
from hivenb.engine.progress.peer_reports import PeerInfo
from hivenb.engine.trust.reliability import MOST_PAUSES, ExcludedPeer
from hivenb.errors import NotInvitedError, ProcessEndedError, SwarmError, UnbelievedStateError

# -- participant -----------------------------------------------------------------------------------------------------
#
# What those who help an optimizer have to know of it.


class Participant(Protocol):
    """An optimizer that takes part in rounds; all of this may change from step to step."""

    dht: Any
    averaging_timeout: float
    load_state_timeout: float
    matchmaking_time: float
    average_state_every: int
    auxiliary: bool
    delay_grad_averaging: bool
    delay_state_averaging: bool
    delay_optimizer_step: bool
    use_local_updates: bool
    state_averager: Any
    #: ``None`` with local updates
    grad_averager: Any
    tracker: Any
    rounds: Any

    @property
    def local_epoch(self) -> int:
        """The swarm epoch that it works on."""

    def is_synchronized_with_peers(self) -> bool:
        """Whether it is no more than an epoch behind the others."""

    def begin_epoch(self, epoch: int) -> None:
        """Be at a swarm epoch with nothing accumulated yet; to be called while the tracker is paused."""


# -- unverified claims -------------------------------------------------------------------------------------------------
#
# Peers that claim to be epochs ahead, of which no state is to be had: nobody can follow them, or should try to.


logger = get_logger(__name__)

#: Epochs by which the newest state to be had may be behind what was reported.
BEHIND = 2

#: Seconds for which a state of a claimed epoch is looked for.
VERIFIED_WITHIN = 10.0

#: For how many times as long a peer's claim counts for nothing then; twice as many the next time, and so on.
PAUSE_FOR_SEARCH = 8


@dataclass(frozen=True)
class _Doubt:
    """Of the claims of some peers.

    :param epochs: that they claim, by their ids
    :param until: the time until which these count for nothing
    """

    epochs: dict[bytes, int]
    until: float


class UnverifiedClaims:
    """Remembers whose epoch could not be had. The training thread notes it, and the tracker's asks.

    :param clock: tells the time, in seconds
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._since: float | None = None
        self._pauses = 0
        self._doubt = _Doubt({}, 0.0)

    def note_download(self, began: float, sought: int, reached: int, others: Iterable[PeerInfo]) -> bool:
        """A download is over.

        :param began: when it began
        :param sought: the newest epoch that was reported then
        :param reached: the epoch of the newest state that was to be had, or this peer's own
        :param others: the other peers, as they report themselves
        :returns: whether some of them are doubted from now on
        """
        if reached >= sought - BEHIND:
            self._since, self._pauses = None, 0
            return False
        self._since = began if self._since is None else self._since
        searched = self._clock() - self._since
        if searched < VERIFIED_WITHIN:
            return False
        claims = {one.peer_id: one.epoch for one in others if one.epoch > reached + BEHIND}
        pause = PAUSE_FOR_SEARCH * searched * 2.0**self._pauses
        self._since, self._pauses = None, min(self._pauses + 1, MOST_PAUSES)
        epochs = {PeerID.from_base58(peer).to_bytes(): epoch for peer, epoch in claims.items()}
        self._doubt = _Doubt(epochs, self._clock() + pause)
        told = ", ".join(f"{peer} reports epoch {epoch}" for peer, epoch in claims.items())
        logger.warning(
            f"{told or 'Nobody is there any more'}, and no peer sends a state of it: this one goes on at epoch "
            f"{reached}, and looks again in {pause:.0f} s. A peer in client mode can send its state to nobody"
        )
        return True

    def excluded_peers(self) -> tuple[ExcludedPeer, ...]:
        """Those whose claims count for nothing at present."""
        doubt = self._doubt
        remaining = doubt.until - self._clock()
        if remaining <= 0:
            return ()
        return tuple(
            ExcludedPeer(peer, f"reports epoch {epoch}, of which no peer sends a state", 0, remaining, is_avoided=False)
            for peer, epoch in doubt.epochs.items()
        )


# -- catching up -----------------------------------------------------------------------------------------------------


#: How often a peer that fell behind asks for the state before it gives up; hivemind itself never does.
LOAD_STATE_ATTEMPTS = 5

#: Seconds for which a peer downloads the state anew whenever an epoch has ended meanwhile.
CATCHING_UP = 60.0

#: Seconds at most for which a peer waits to learn who is there, before its first batch. If nobody is, it learns so at
#: once.
FIRST_LOOK = 5.0

#: Seconds at most for which it waits where much depends on who is there.
FIRST_LOOK_UNDER_LOAD = 20.0

#: Seconds for which others that are there may give no state, as while all of them begin anew.
GIVEN_WITHIN = 10.0

#: Seconds between two looks for an epoch that is expected.
_LOOK_AGAIN = 0.1


class CatchingUp:
    """Whether a peer has to take over the others' state, and since when it tries.

    :param participant: the optimizer of that peer
    """

    def __init__(self, participant: Participant):
        self._participant = participant
        self._since: float | None = None
        self._asks_since: float | None = None
        #: whether the others have averaged gradients without this peer, in the background
        self.was_excluded = False
        #: whether others that have ended this peer's epoch are known to average its gradients in the background: they
        #: report the next one before they have its state
        self.others_are_late = False
        self.claims = UnverifiedClaims()

    @property
    def is_called_for(self) -> bool:
        """Whether this peer needs the others' state before it goes on."""
        return self.was_excluded or self.has_missed_a_round

    @property
    def has_missed_a_round(self) -> bool:
        """Whether the others have ended an epoch without this peer."""
        # hivemind lets a peer that is one epoch behind the others take part in the round which they are about to end.
        # Where all wait for each other's gradients that round is over: this one would come to their next round, take
        # it for the last one, and have other moments than they from then on.
        own = self._participant
        if own.local_epoch >= own.tracker.global_epoch or self.is_hopeless:
            return False
        return self.waits_for_gradients and not self.may_be_waited_for

    @property
    def waits_for_gradients(self) -> bool:
        """Whether this peer ends an epoch only when the gradients of all are there, in one group."""
        own = self._participant
        in_one_group = own.grad_averager is not None and not own.grad_averager.group_size_is_fixed
        return in_one_group and not (own.delay_grad_averaging or own.auxiliary)

    @property
    def may_be_waited_for(self) -> bool:
        """Whether others that have ended this peer's epoch may average its gradients all the same, in the background.

        Its round tells: it is a missed one if none of them is in it.
        """
        own = self._participant
        return own.local_epoch == own.tracker.global_epoch - 1 and self.is_in_a_round_of_those_ahead

    @property
    def is_in_a_round_of_those_ahead(self) -> bool:
        """Whether others that are one epoch ahead, if there are any, are to be in this peer's round as well."""
        return self.waits_for_gradients and (self.others_are_late or bool(self._participant.rounds.has_group))

    @property
    def may_follow(self) -> bool:
        """Whether this peer has what it takes to end an epoch that the others have ended a moment ago.

        With gradients averaged in the background, here or at them, they wait for its own then.
        """
        # hivemind/optim/optimizer.py:_should_load_state_from_peers wants the very epoch of the others at the first look
        # of each. Over a long line, that look may come when they have gone on
        own = self._participant
        return bool((own.delay_grad_averaging and own.rounds.last.group_size > 1) or self.may_be_waited_for)

    def is_late(self) -> bool:
        """Whether the others are ahead of a peer that has computed nothing yet; waits until they were looked at."""
        own = self._participant
        if own.auxiliary:
            return False
        own.tracker.look_at_once()
        if not own.tracker.fetched_global_progress_this_epoch.wait(FIRST_LOOK):
            return False  # it will see with its first batch
        return bool(own.local_epoch < own.tracker.global_epoch)

    @property
    def is_under_way(self) -> bool:
        """Whether this peer has begun to download the swarm's state, and has ended no epoch with it yet."""
        return self._since is not None

    @property
    def is_hopeless(self) -> bool:
        """Whether epochs are shorter than a download."""
        return self._since is not None and time.monotonic() - self._since > CATCHING_UP

    def take_over_state(self, **kwargs: Any) -> None:
        """Download parameters, optimizer state and epoch from the peer that is furthest ahead.

        :param kwargs: of the averagers' own methods
        :raises SwarmError: if no peer could be reached in several attempts
        """
        # Replaces hivemind/optim/optimizer.py:load_state_from_peers, which tries for ever, and before that waits for
        # the rounds that this peer has agreed on: one that looks for a group finds none any more.
        own = self._participant
        own.rounds.take(wait=True)
        if self.has_missed_a_round:
            own.rounds.gradients.cancel()
        own.rounds.leave(wait=False)
        own.state_averager.give_up_searches()
        own.state_averager.step(wait_for_delayed_updates=True)
        while own.state_averager.pending_updates:  # each wait has a limit; a late step would be made on what comes
            own.state_averager.step(wait_for_delayed_updates=True)
        was_excluded = self.was_excluded
        self.begin()
        with own.tracker.pause_updates():
            began, sought, taken_before = time.monotonic(), own.tracker.global_epoch, own.state_averager.states_taken
            position = f"This peer is at epoch {own.local_epoch} and the swarm at {sought}"
            try:
                download_in_attempts(partial(self._download, timeout=own.load_state_timeout, **kwargs), position)
            except BaseException:
                self.was_excluded = was_excluded  # whoever goes on all the same still lacks what the others have
                raise
            if self.claims.note_download(began, sought, own.local_epoch, self._others):
                own.tracker.look_at_once()
            has_taken = own.state_averager.states_taken > taken_before
            if has_taken:
                self.others_are_late = self.waits_for_gradients and own.local_epoch == sought - 1
            # what a newcomer that could download nothing has at random is no state of the next epoch, if one behind
            has_state = own.local_epoch > 0 or has_taken
            lacks_all = not has_state and own.local_epoch < own.tracker.global_epoch
            # nobody gave it: all may be about to begin anew themselves
            lacks_news = was_excluded and not has_taken and self._others_share and not self._has_asked_long(began)
            self.was_excluded = (lacks_all or lacks_news) and not self.is_hopeless
            self._asks_since = self._asks_since if lacks_news and self.was_excluded else None
            # with steps in the background all peers are one behind
            may_jump = has_state and (own.delay_optimizer_step or self.is_hopeless)
            # by now: the others may have ended an epoch during the download
            newest = max(own.tracker.global_epoch, self.newest_epoch())
            own.begin_epoch(newest if may_jump and own.local_epoch == newest - 1 else own.local_epoch)

    def _has_asked_long(self, began: float) -> bool:
        """Whether others have given nothing for so long that they may have nothing to give, as helpers do."""
        self._asks_since = self._asks_since or began
        return time.monotonic() - self._asks_since > GIVEN_WITHIN

    def _download(self, **kwargs: Any) -> None:
        own = self._participant
        with_state = [own.state_averager, *([own.grad_averager] if has_state_of_its_own(own.grad_averager) else [])]
        require_invited(own.dht)
        for averager in with_state:
            averager.newest_epoch = self.newest_epoch
            averager.load_state_from_peers(**kwargs)

    def newest_epoch(self, expected: int = 0) -> int:
        """The newest epoch of the others, as they report it.

        :param expected: that one of them claims to have reached; a while is waited for others to report it
        """
        tracker, deadline = self._participant.tracker, time.monotonic() + FIRST_LOOK
        while True:
            newest = max((one.epoch for one in self._others), default=tracker.global_epoch)
            if newest >= expected or time.monotonic() > deadline:
                return int(newest)
            tracker.look_at_once()
            time.sleep(_LOOK_AGAIN)

    def can_be_helped(self) -> bool:
        """Whether others are there that give their state to those who ask; waits until they were looked at."""
        self._look_anew(FIRST_LOOK_UNDER_LOAD)
        return self._others_share

    def are_there(self, peers: Collection[bytes]) -> bool:
        """Whether some of these peers are there, and their reports count; waits until they were looked at.

        :param peers: their ids
        """
        self._look_anew(FIRST_LOOK)
        return any(PeerID.from_base58(one.peer_id).to_bytes() in peers for one in self._others)

    def _look_anew(self, seconds: float) -> None:
        tracker, began = self._participant.tracker, time.monotonic()
        tracker.look_at_once()
        while time.monotonic() < began + seconds:
            if tracker.look is not None and tracker.look.taken_at >= began:
                break
            time.sleep(_LOOK_AGAIN)

    @property
    def _others_share(self) -> bool:
        """Whether others are there that can give their state, as far as was looked."""
        return any(not one.client_mode for one in self._others)

    @property
    def _others(self) -> list[PeerInfo]:
        """The others that are there, and whose reports count."""
        look = self._participant.tracker.look
        if look is None:
            return []
        return [one for one in look.peers if not one.is_self and one.peer_id not in look.gone | look.uncounted]

    def begin(self) -> None:
        """A download is about to begin, perhaps not the first one."""
        self._since = self._since or time.monotonic()
        self.was_excluded = False

    def end(self) -> None:
        """This peer has ended an epoch with the others."""
        self._since = None


def download_in_attempts(download: Callable[[], None], position: str) -> None:
    """Download a state; a download that fails is repeated, and one that fails again and again is an error.

    :param download: asks the peer that is furthest ahead
    :param position: where this peer and the swarm are, in words
    :raises SwarmError: if it could not be had in several attempts, or does not fit this peer
    :raises ProcessEndedError: if the process that downloads it has ended
    """
    misfits = 0
    last_error: Exception | None = None
    refusal: UnbelievedStateError | None = None
    for attempt in range(1, LOAD_STATE_ATTEMPTS + 1):
        try:
            return download()
        except (ProcessEndedError, NotInvitedError):
            raise  # nothing can be downloaded before that is started anew, or by one that nobody lets in
        except UnbelievedStateError as e:
            refusal = last_error = e
            logger.warning(str(e))
        except SwarmError as e:
            # it does not fit; but of what a peer of plain hivemind sends, the end may be lost, see stream_ends.py
            misfits += 1
            if misfits > 1:
                raise
            logger.info(f"The state of a peer does not fit; it is downloaded once more: {e}")
            last_error = e
        except Exception as e:
            logger.info(f"Could not load the state from peers ({attempt} of {LOAD_STATE_ATTEMPTS}): {e!r}")
            last_error = e
    if refusal is last_error and refusal is not None:
        raise UnbelievedStateError(f"{position}, but {refusal}") from refusal
    raise SwarmError(
        f"{position}, but the state could not be downloaded in {LOAD_STATE_ATTEMPTS} attempts. Do all peers train the "
        "same model with the same optimizer?"
    ) from last_error
