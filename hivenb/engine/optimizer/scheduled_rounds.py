"""Rounds of averaging that are agreed on before they are due: when they are looked for, with whom, and who leaves."""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from hivemind.averaging.control import AveragingStage
from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time

from hivenb.engine.averaging.averager import ANSWER_TIMEOUT
from hivenb.engine.averaging.round import Round
from hivenb.engine.matchmaking.matchmaking import AttendanceList, ExpectedPeers
from hivenb.engine.optimizer.catch_up import CatchingUp, Participant
from hivenb.engine.process.interrupts import BackgroundThread
from hivenb.engine.trust.aggregation import NEXT_TO_NOTHING, SampleReports
from hivenb.engine.trust.reliability import ExcludedPeer, PeerReliability, banned, blocked_by_hand
from hivenb.errors import ProcessEndedError

# -- agreed round ----------------------------------------------------------------------------------------------------
#
# A round of averaging that peers agree on before it is due: looked for in good time, taken, or left.


class AgreedRound:
    """The next round of one averager, from when it is looked for until it begins. For the training thread.

    An averager's process takes up to 0.3 s until it has begun to look for a group, and training goes on meanwhile.
    """

    def __init__(self) -> None:
        #: the round, as far as it is known and has not begun; ``None`` if there is none
        self.control: Round | None = None
        self._scheduling: Future[Round] | None = None

    def look_for(self, schedule: Callable[[], Round]) -> None:
        """Look for a group in the background, unless that has been asked for already.

        :param schedule: lets the averager look for it, and returns the round when it does
        """
        if self._scheduling is None:
            self._scheduling = _in_thread(schedule)

    @property
    def is_looked_for(self) -> bool:
        """Whether a round is being scheduled."""
        return self._scheduling is not None

    def take(self, wait: bool = False) -> Round | None:
        """Know of the round that was scheduled meanwhile, and no longer of one that has begun or was given up.

        :param wait: for the one that is being scheduled
        :returns: the round that is to come, if there is any
        :raises TimeoutError: if the process of the averager does not answer
        """
        if self._scheduling is not None and (wait or self._scheduling.done()):
            try:
                self.control = self._scheduling.result(ANSWER_TIMEOUT)
            except ProcessEndedError:
                self.control = None  # nobody looks for it any more; before the next batch, a successor is made
            self._scheduling = None
        if self.control is not None and not self.control.is_to_come:
            self.control = None
        return self.control

    def cancel(self) -> None:
        """Give it up, whether it has a group already or not."""
        if self.control is not None:
            self.control.cancel()
            self.control = None

    def leave(self) -> Round | None:
        """Take no part in it: look no further, or count for nothing in the group that has met.

        :returns: the round, which may still be under way
        """
        left, self.control = self.control, None
        if left is None:
            return None
        if left.stage is AveragingStage.LOOKING_FOR_GROUP:
            left.cancel()
        elif not left.triggered and not left.done():
            left.weight = 0.0
            left.allow_allreduce()
        return left


def _in_thread(call: Callable[[], Round]) -> Future[Round]:
    """What a call will give; an executor would wait for its threads at the end of the process."""
    future: Future[Round] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as e:
            future.set_exception(e)

    BackgroundThread(target=run, name="schedule-round").start()
    return future


# -- epoch report ----------------------------------------------------------------------------------------------------
#
# What a swarm epoch came to, as a value.


@dataclass(frozen=True)
class EpochReport:
    """What one swarm epoch came to at this peer.

    :param epoch: the epoch that has just begun; also the number of global steps made so far
    :param samples: samples that this peer has put in
    :param group_size: peers that averaged gradients with this one, itself included; 1 when it was alone or the
      round failed. With ``delay_grad_averaging``, in the round before: this one has just begun
    :param seconds: for which this peer's training stood still since the epoch before: all that its steps took besides
      computing gradients, the transition to this epoch included
    :param failed: why the round of gradient averaging failed; ``None`` if it did not
    :param refused: why what a peer has sent in that round was not taken, in words, by the peer's id
    """

    epoch: int
    samples: int
    group_size: int
    seconds: float
    failed: str | None = None
    refused: Mapping[str, str] = field(default_factory=dict)


# -- gradient round --------------------------------------------------------------------------------------------------
#
# What became of a round that averages gradients: with how many, why it failed, whether this peer was excluded.


#: Seconds after which a peer that looks for others to average gradients with asks itself whether it was excluded.
LEFT_OUT_AFTER = 1.0

#: Seconds after which it asks once more, as somebody may have begun to look at that moment.
ASK_AGAIN_AFTER = 0.5


class MissedRound(Exception):
    """The others have ended an epoch whose gradients this peer was about to average with them."""


@dataclass(frozen=True)
class RoundOutcome:
    """What a round came to at this peer.

    :param group_size: peers that averaged together, this one included
    :param failed: why it failed; ``None`` if it did not, or there was nobody to average with
    :param refused: why what a peer has sent was not taken, in words, by the peer's id
    :param peers: ids of those that averaged together and have said for which epoch
    """

    group_size: int = 1
    failed: str | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    peers: frozenset[bytes] = frozenset()

    def report(self, epoch: int, samples: int, seconds: float) -> EpochReport:
        """What the epoch came to that this round has ended, as :class:`EpochReport` has it."""
        return EpochReport(epoch, samples, self.group_size, seconds, self.failed, self.refused)


class CanBeAlone(Protocol):
    """An averager that knows whether it has met anybody."""

    def is_alone(self, epoch: float) -> bool:
        """Whether it looks for a group for the round of an epoch, and has met nobody."""


def outcome_of(control: Round, timeout: float) -> RoundOutcome:
    """Wait for a round.

    It has not failed if this peer or all others have left: then there was nobody to average with.

    :param timeout: ``averaging_timeout``, in seconds; a round that has not begun by then is given up
    """
    try:
        gathered = control.result(timeout)
        refused = {str(peer): reason for peer, reason in getattr(gathered, "refused", {}).items()}
        peers = frozenset(peer.to_bytes() for peer, epoch in gathered.items() if epoch == control.epoch)
        return RoundOutcome(len(gathered), refused=refused, peers=peers)
    except concurrent.futures.CancelledError:
        return RoundOutcome(
            failed=None if control.is_deserted else "given up: the others have gone on without this peer"
        )
    except (TimeoutError, concurrent.futures.TimeoutError):
        if control.stage is not AveragingStage.RUNNING_ALLREDUCE:
            control.cancel()
        return RoundOutcome(failed=f"not done within averaging_timeout={timeout} s")
    except Exception as e:
        return RoundOutcome(failed=repr(e))


def _has_succeeded(control: Round) -> bool:
    return control.done() and not control.cancelled() and control.exception() is None


def is_excluded(
    control: Round, averager: CanBeAlone, state_round: Round | None, oldest_epoch: Callable[[], int], timeout: float
) -> bool:
    """Wait until a round of gradients has a group, or is given up since the others have met without this peer.

    One that joins just then looks for them in vain, while they may wait for it: to average the state with them, which
    it does after the gradients, or to be ready for their next round.

    :param averager: of the gradients
    :param state_round: the round of the state that follows
    :param oldest_epoch: tells that of the others that can take part in rounds, as of now
    :param timeout: ``averaging_timeout``, in seconds
    :returns: whether it was given up
    """

    def finds_nobody(seconds: float) -> bool:
        """Whether, after so many seconds, it has nobody yet though all who could come have looked for it."""
        with contextlib.suppress(Exception, concurrent.futures.CancelledError):  # is looked at by outcome_of
            control.result(seconds)
        if control.stage is not AveragingStage.LOOKING_FOR_GROUP:
            return False
        have_met = (AveragingStage.AWAITING_TRIGGER, AveragingStage.RUNNING_ALLREDUCE)
        are_waiting = state_round is not None and (state_round.stage in have_met or _has_succeeded(state_round))
        is_over = oldest_epoch() > control.epoch
        return (are_waiting or is_over) and averager.is_alone(control.epoch)

    for _ in range(math.ceil(timeout / LEFT_OUT_AFTER)):
        if finds_nobody(LEFT_OUT_AFTER) and finds_nobody(ASK_AGAIN_AFTER):
            return control.cancel()
        if control.stage is not AveragingStage.LOOKING_FOR_GROUP:
            break
    return False


# -- agreed rounds ---------------------------------------------------------------------------------------------------


#: Seconds there and back from which on a way less is worth what it takes: peers that differ by what one step makes of a
#: codec, and a small model that each sends to all others.
LONG_LINE = 0.03

#: Seconds for which gradients wait for the group of the state, where its rounds take long. Whoever has just come may
#: look for it in vain.
MET_WITHIN = 2.0


class AgreedRounds:
    """The next round of gradients and the next one of the state, of one optimizer.

    :param participant: the optimizer
    :param catching_up: what it knows of being behind the others
    """

    def __init__(self, participant: Participant, catching_up: CatchingUp):
        self._participant, self._catching_up = participant, catching_up
        self.gradients, self.state = AgreedRound(), AgreedRound()
        #: what the last round of gradients came to
        self.last = RoundOutcome()
        self.attendance = AttendanceList()
        self._reliability, self._begins_anew = PeerReliability(), threading.Event()
        #: the others for whom no round waits, as of the last look; for any thread to read
        self.excluded_peers: tuple[ExcludedPeer, ...] = ()
        self._state_to_come: Round | None = None
        self._ahead: frozenset[bytes] = frozenset()
        self._told_samples: tuple[SampleReports, Any] | None = None
        self._told_line: tuple[bool, Any] = False, None

    def begin_anew(self) -> None:
        """Wait for everybody again, from the next look at the swarm on; from any thread.

        For when all return from a diverged state: rounds of what is not finite stall, and are nobody's fault.
        """
        self._begins_anew.set()

    # -- who is there ---------------------------------------------------------------------------------------------

    def see_swarm(self, reports: Sequence[LocalTrainingProgress], gone: frozenset[bytes]) -> frozenset[bytes]:
        """Let rounds follow what the others do. On the tracker's thread, also while this peer ends an epoch.

        :param reports: of the other peers that are there
        :param gone: ids of those that have gone without a goodbye
        :returns: ids of those whose reports do not count: they neither end epochs nor draw this peer along
        """
        doubted = self._catching_up.claims.excluded_peers()
        own, excluded = self._participant, self._look_at_reliability(doubted)
        names = frozenset(one.peer for one in excluded)
        avoided = frozenset(one.peer for one in excluded if one.is_avoided)
        # whoever averages with nobody may have itself to blame, and follows all the same
        averages = self._reliability.has_averaged_with(
            [report.peer_id for report in reports if report.peer_id not in names]
        )
        uncounted = names if averages else frozenset(one.peer for one in doubted)
        present = self.attendance.call([report for report in reports if report.peer_id not in uncounted])
        present = frozenset(one for one in present if one.peer not in names)
        newest, oldest = self.attendance.newest_epoch, self.attendance.oldest_epoch
        # one peer that has gone on alone draws nobody along but those who have nothing of their own yet
        over = newest if self._catching_up.is_under_way else oldest
        state_ahead = 0 if own.delay_state_averaging or own.delay_optimizer_step else 1
        for name, ahead, follows in (("state_averager", state_ahead, 1), ("grad_averager", self.gradients_ahead, 0)):
            averager = getattr(own, name, None)  # the tracker is at work before they are made
            if averager is not None:
                if not averager.group_size_is_fixed:
                    averager.give_up_searches(before=over + min(ahead, 0))
                    if ahead > 0:  # the others have had the round that is named after the epoch they are in
                        averager.give_up_if_alone(over)
                if own.tracker.local_progress.epoch >= newest - 1:
                    averager.expect_peers(ExpectedPeers(present, gone, ahead, follows, names, avoided))
        self._tell_averager(reports)
        return uncounted

    def _tell_averager(self, reports: Sequence[LocalTrainingProgress]) -> None:
        """Let the averager know how much its senders may count for, and whether the line is long; if that is news."""
        own = self._participant
        samples = SampleReports.of(own.tracker.target_batch_size, [*reports, own.tracker.local_progress])
        averager = getattr(own, "grad_averager", None) or getattr(own, "state_averager", None)
        if averager is None:
            return
        if (samples, averager) != self._told_samples:
            self._told_samples = samples, averager
            averager.note_reports(samples)
        if (self._line_is_long, averager) != self._told_line:
            self._told_line = self._line_is_long, averager
            averager.note_line(self._line_is_long)

    def _look_at_reliability(self, doubted: Sequence[ExcludedPeer]) -> tuple[ExcludedPeer, ...]:
        for name in ("grad_averager", "state_averager"):
            averager = getattr(self._participant, name, None)
            for report in () if averager is None else averager.take_round_reports():
                self._reliability.note(name, report)
        if self._begins_anew.is_set():
            self._begins_anew.clear()
            self._reliability.reset()
        reliability = self._reliability.excluded_peers(self._participant.tracker.local_progress.epoch)
        blocked, ban_list = (getattr(self._participant.dht, name, None) for name in ("blocked_peers", "ban_list"))
        by_hand = {} if blocked is None else {peer: blocked_by_hand(peer) for peer in sorted(blocked.all)}
        by_host = {} if ban_list is None else {peer: banned(peer) for peer in sorted(ban_list.list.banned)}
        by_order = by_hand | by_host
        by_itself = {one.peer: one for one in (*doubted, *reliability)}
        self.excluded_peers = tuple((by_itself | by_order).values())
        return self.excluded_peers

    @property
    def reasons(self) -> dict[str, str]:
        """Why no round waits for peers, by their ids; from any thread."""
        return {PeerID(one.peer).to_base58(): str(one) for one in self.excluded_peers}

    @property
    def gradients_ahead(self) -> int:
        """By how much the number of a round of gradients is ahead of what its peers report while they look for it."""
        return -1 if self._participant.delay_grad_averaging or self._catching_up.others_are_late else 0

    @property
    def is_due(self) -> bool:
        """Whether it is time to look for a group, if there is anybody to be met, at the same epoch."""
        own = self._participant
        if not own.is_synchronized_with_peers():
            return False  # whoever has just come would look for a round that the others are in already
        eta = own.tracker.estimated_next_update_time - get_dht_time()
        return bool(eta <= own.matchmaking_time and not self.is_alone)

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody to average with."""
        return bool(self._participant.tracker.global_progress.num_peers <= 1)

    @property
    def has_group(self) -> bool:
        """Whether the round of this peer's epoch has a group, which waits for its gradients. For the training thread.

        Those who average gradients in the background report the next epoch already then.
        """
        control = self.gradients.take()
        if control is None or control.epoch != self._participant.local_epoch:
            return False
        return bool(control.stage is AveragingStage.AWAITING_TRIGGER)

    # -- the training thread: before a round --------------------------------------------------------------------

    def take(self, wait: bool = False) -> None:
        """Know of the rounds that were scheduled meanwhile, and no longer of those that have begun or were given up.

        :param wait: for those that are being scheduled
        :raises TimeoutError: if the process of an averager does not answer
        """
        self.gradients.take(wait)
        self.state.take(wait)

    def look_for_gradients(self) -> None:
        """Look for the round that ends this epoch, if it is about to end."""
        self.take()
        if self.gradients.control is None and self.is_due:
            self._schedule(self.gradients, self._participant.grad_averager, self._participant.local_epoch)

    def look_for_state(self) -> None:
        """Look for the round that begins the next epoch, if that is about to begin and none is under way."""
        own = self._participant
        next_epoch = own.local_epoch + 1
        if next_epoch % own.average_state_every != 0 or own.state_averager.averaging_in_progress:
            return
        if own.state_averager.finished_averaging_round.is_set():
            return  # what this peer says of its state to those whom it meets is what it was before that round
        if self.state.control is None and not self.state.is_looked_for and self.is_due:
            offers = self._may_average_state_early
            if offers:
                own.state_averager.be_ready_early()
            kwargs = {"offers_early": offers, "is_waited_for": not self._averages_in_background}
            self._schedule(self.state, own.state_averager, next_epoch, **kwargs)

    @property
    def _averages_in_background(self) -> bool:
        """Whether training goes on while a round of the state is held."""
        own = self._participant
        return own.delay_grad_averaging or own.delay_optimizer_step or own.delay_state_averaging

    @property
    def _may_average_state_early(self) -> bool:
        """Whether the state can be averaged before the step: it is there by then, and all make the same step.

        On a short and wide line, where the round after it takes little, only if no codec makes something else of the
        gradients at each peer, which would stay for an epoch, and if the state is small. On no line if peers step
        differently with the same gradients, of which all would stay for an epoch.
        """
        own = self._participant
        if self._averages_in_background or own.use_local_updates or own.auxiliary:
            return False
        if own.state_averager.group_size_is_fixed or not own.state_averager.may_begin_early:
            return False
        if not own.grad_averager.sends_exactly:
            return self._state_takes_long
        differ, costs_little = own.state_averager.peers_step_differently, own.state_averager.costs_little_early
        return bool(costs_little or (self._state_takes_long and not differ))

    @property
    def _state_takes_long(self) -> bool:
        """Whether a round of the state that is held after the step takes long, on a long line or on a narrow one."""
        return self._line_is_long or bool(self._participant.state_averager.rounds_take_long)

    @property
    def _line_is_long(self) -> bool:
        return bool(self._participant.tracker.list.round_trip >= LONG_LINE)

    def _schedule(self, agreed: AgreedRound, averager: Any, epoch: int, **kwargs: Any) -> None:
        timeout = self._participant.averaging_timeout
        agreed.look_for(partial(averager.schedule_step, gather=epoch, timeout=timeout, **kwargs))

    def note_who_is_ahead(self) -> None:
        """Know who has ended this peer's epoch already, and is to be in the round that ends it here."""
        # by their reports, and not by the swarm's epoch: hivemind leaves clients out of that
        epoch = self._participant.local_epoch
        may_come = self.attendance.newest_epoch == epoch + 1 and self._catching_up.is_in_a_round_of_those_ahead
        self._ahead = self.attendance.ahead_of(epoch) if may_come else frozenset()

    def be_ready_for_gradients(self) -> None:
        """Have a round of gradients to begin, whether it was looked for before or not; none if this peer is alone."""
        self.take(wait=True)
        if self.is_alone:
            # hivemind would do it, and load the local gradients by the way: twice divided, where they are reused
            self.gradients.cancel()
        elif self.gradients.control is None:
            self._schedule(self.gradients, self._participant.grad_averager, self._participant.local_epoch)
            self.take(wait=True)
        self._state_to_come = self.state.control
        self._wait_for_early_state()

    def _wait_for_early_state(self) -> None:
        """Let a round of the state end that begins by itself, before gradients are sent.

        On a slow line, the one would keep the other waiting, and peers would take that for a stall. Where rounds take
        next to no time, only one is waited for that has begun by now.
        """
        state = self.state.control
        if state is None or state.begins_early is None or state.done() or self.is_alone:
            return
        with suppress(TimeoutError, concurrent.futures.TimeoutError, ProcessEndedError):
            if state.begins_early.result(MET_WITHIN if self._state_takes_long else 0.0):
                outcome_of(state, self._participant.averaging_timeout)

    def begin_state_early(self) -> None:
        """Have the state exchanged beside the gradients at the latest, if this peer has offered that, and all agree."""
        control = self.state.control
        if control is not None and control.offers_early and not self.is_alone:
            self.state.control = None
            self._participant.state_averager.exchange_early(control, self._participant.averaging_timeout)

    def note_none_began(self) -> None:
        """No round of gradients has begun, maybe since there is nobody, or this peer is about to end."""
        is_over = self.is_alone or self._participant.grad_averager.has_retired
        self.last = RoundOutcome(failed=None if is_over else "given up before it began")

    # -- the training thread, or that of delayed updates: the round ------------------------------------------------

    def average_gradients(self, control: Round | None) -> RoundOutcome:
        """Wait for a round of gradients that has begun; ``None`` where there was nobody to average with.

        :raises MissedRound: if the others have ended the epoch without this peer, which has nothing to step with
        """
        own = self._participant
        if control is None:
            self.last = RoundOutcome()
            return self.last
        is_in_one_group = not own.grad_averager.group_size_is_fixed
        excluded = is_in_one_group and is_excluded(
            control,
            own.grad_averager,
            self._state_to_come,
            oldest_epoch=lambda: self.attendance.oldest_epoch,
            timeout=own.averaging_timeout,
        )
        self.last = outcome_of(control, own.averaging_timeout)
        if self._ahead and not self.last.failed:
            if self._ahead & self.last.peers:
                self._catching_up.others_are_late = True
            elif self._catching_up.are_there(self._ahead):
                raise MissedRound  # its group was one of before, or those who are late as well
        have_gone_on = is_in_one_group and self.attendance.newest_epoch > own.local_epoch
        if self.last.failed and (have_gone_on or excluded):
            # where the state was averaged before the step, no round after it mends what this peer has not got
            if (have_gone_on or own.state_averager.has_begun_early) and not own.delay_grad_averaging:
                raise MissedRound
            self._catching_up.was_excluded = True
            if self._state_to_come is not None:
                self._state_to_come.weight = NEXT_TO_NOTHING
        return self.last

    # -- the training thread: leaving -------------------------------------------------------------------------------

    def end_late_searches(self) -> None:
        """Give up what looks for a group since the last epoch, before the next one begins.

        A peer whose last round of state averaging is still under way takes part in no new one. Its peers would look for
        it until their timeout, and take part in none themselves, with nobody ever at the same epoch as another one.
        """
        self.take(wait=True)
        averager = self._participant.state_averager
        if averager.give_up_searches(before=self._participant.local_epoch + 1):
            averager.step(wait_for_delayed_updates=True)

    def leave(self, wait: bool = True) -> None:
        """Take part in none of the rounds that were agreed on.

        :param wait: until those that have a group already are over, in which this peer counts for nothing
        """
        self.take(wait=True)
        left = [control for agreed in (self.gradients, self.state) if (control := agreed.leave()) is not None]
        for control in left:
            # one that has begun may write into what is to be replaced
            if (wait or control.begins_early is not None) and not control.done():
                outcome_of(control, self._participant.averaging_timeout)
