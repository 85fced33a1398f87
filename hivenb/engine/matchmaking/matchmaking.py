"""Matchmaking of peers that are at the same epoch, know how many they are, and wait for each other's trigger."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from concurrent.futures import InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import hivemind
from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.key_manager import GroupKeyManager
from hivemind.averaging.matchmaking import Matchmaking, MatchmakingException
from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.p2p import P2P, P2PContext, P2PDaemonError, P2PHandlerError, PeerID, StubBase
from hivemind.proto import averaging_pb2
from hivemind.utils import MPFuture, get_dht_time, get_logger
from hivemind.utils.asyncio import as_aiter

from hivenb.engine.matchmaking.group_records import (
    LARGEST_GROUP,
    all_offer_early,
    averages_its_own,
    epoch_of,
    is_readable,
    marked,
    why_no_group,
)
from hivenb.engine.network.streams import CLOSED_WITHIN, left_open
from hivenb.engine.trust.reliability import NOTABLE, ExchangeNotes, RoundReport

# -- early beginnings ------------------------------------------------------------------------------------------------
#
# Rounds that begin before their trigger, as soon as their group has met, where all in it have offered that.


class EarlyBeginnings:
    """Which rounds of this peer may begin early; in the averager's own process.

    All in a group have the same records of each other, and come to the same answer.
    """

    def __init__(self) -> None:
        self._allowed: dict[int, MPFuture[bool]] = {}

    def allow(self, epoch: int, answer: MPFuture[bool], have_met: Iterable[tuple[StepControl, GroupInfo]]) -> None:
        """Let the round of an epoch begin early.

        :param answer: is to know whether it does, as soon as it has a group; never, if its search is over already
        :param have_met: rounds that wait for their triggers, and their groups
        """
        self._allowed[epoch] = answer
        for step, group in have_met:
            self.note_group(step, group)

    def note_group(self, step: StepControl | None, group: GroupInfo) -> None:
        """Begin a round that has a group now, if it may."""
        answer = self._answer_of(step)
        if step is None or answer is None:
            return
        begins = not step.done() and not step.triggered and all_offer_early(group.gathered)
        if begins:
            step.allow_allreduce()
        answer.set_result(begins)

    def note_end(self, step: StepControl) -> None:
        """Know that a round is over, be it that it has found no group."""
        answer = self._answer_of(step)
        if answer is not None:
            answer.set_result(False)

    def _answer_of(self, step: StepControl | None) -> MPFuture[bool] | None:
        epoch = None if step is None else epoch_of(step.data_for_gather)
        return None if epoch is None else self._allowed.pop(epoch, None)


# -- expected peers --------------------------------------------------------------------------------------------------
#
# Which peers a round of averaging waits for: those that were there for its epoch, are no further, and are not gone.


@dataclass(frozen=True)
class Attendance:
    """Of a peer that is at the newest epoch or the one before, as whoever is further behind has to catch up first.

    :param peer: its id
    :param since: the first epoch for which it has been there without a break
    :param epoch: that it has reported last
    """

    peer: bytes
    since: int
    epoch: int


@dataclass(frozen=True)
class ExpectedPeers:
    """The other peers of a run that a round may wait for.

    :param present: of them, those that can take part in rounds
    :param gone: ids of those that have gone without a goodbye
    :param excluded: ids of those for which nobody waits, as they have kept others waiting
    :param avoided: ids of those that are not let into groups either
    :param ahead: by how much the number of a round is ahead of what its peers report while they look for each other
    :param follows: by how much it is ahead of the epoch that its peers have trained in
    """

    present: frozenset[Attendance]
    gone: frozenset[bytes] = frozenset()
    ahead: int = 0
    follows: int = 0
    excluded: frozenset[bytes] = frozenset()
    avoided: frozenset[bytes] = frozenset()

    def of_round(self, epoch: int | None) -> frozenset[bytes]:
        """Ids of those that come to a round of that epoch: neither who is further already nor who came later."""
        return frozenset(
            one.peer
            for one in self.present
            if epoch is None or (one.since <= epoch - self.follows and one.epoch <= epoch - self.ahead)
        )


class AttendanceList:
    """Remembers since when each peer has been there. One thread calls it; any may read the epochs."""

    def __init__(self) -> None:
        self._known: dict[bytes, Attendance] = {}
        #: the newest epoch of another peer
        self.newest_epoch = 0
        #: the oldest epoch of those that can take part in rounds
        self.oldest_epoch = 0

    def ahead_of(self, epoch: int) -> frozenset[bytes]:
        """Ids of the other peers that have ended an epoch, as of the last call."""
        return frozenset(peer for peer, known in self._known.items() if known.epoch > epoch)

    def call(self, reports: Sequence[LocalTrainingProgress]) -> frozenset[Attendance]:
        """Those that are there and can take part in rounds.

        :param reports: the newest one of each other peer
        """
        self.newest_epoch = newest = max((report.epoch for report in reports), default=0)
        # one that a look has missed is remembered for an epoch
        remembered = {peer: one for peer, one in self._known.items() if one.epoch >= newest - 1}
        present = []
        for report in reports:
            if report.epoch >= newest - 1:
                known = remembered.get(report.peer_id)
                since = report.epoch if known is None else min(known.since, report.epoch)
                present.append(Attendance(report.peer_id, since, report.epoch))
        self._known = remembered | {one.peer: one for one in present}  # at once: other threads read it
        self.oldest_epoch = min((one.epoch for one in present), default=0)
        return frozenset(present)


# -- given up search -------------------------------------------------------------------------------------------------
#
# What a peer that gives up its search asks its leader, which may have begun a round with it and not know that yet.


logger = get_logger(__name__)

#: Seconds that a leader may take to say whether it has begun, and then to say with whom.
ANSWERED_WITHIN = 2.0

#: What is raised where a peer cannot be reached.
UNREACHABLE = (P2PDaemonError, P2PHandlerError, OSError, EOFError)

# of messages whose group has no id: the peer that leaves does not know in which one it may be
_GIVEN_UP = averaging_pb2.AveragingData(code=averaging_pb2.GROUP_DISBANDED)
_HAS_BEGUN = averaging_pb2.AveragingData(code=averaging_pb2.BEGIN_ALLREDUCE)


async def has_begun(leader: StubBase) -> bool:
    """Tell a leader that this peer has given up its search.

    :param leader: a stub of its averager
    :returns: whether it has begun with this peer, and will say so in its answer to the request to be let in; not if it
      cannot be reached, or is one of plain hivemind
    """
    try:
        async with contextlib.aclosing(await leader.rpc_aggregate_part(as_aiter(_GIVEN_UP))) as answers:
            return bool(await anext(answers, None) == _HAS_BEGUN)
    except UNREACHABLE as e:
        logger.debug(f"A leader could not be told that a search was given up: {e!r}")
    return False


def is_given_up(message: Any) -> bool:
    """Whether that is what a peer tells its leader."""
    return bool(message == _GIVEN_UP)


def answer(has_begun: bool) -> averaging_pb2.AveragingData:
    """What a leader says then."""
    return _HAS_BEGUN if has_begun else averaging_pb2.AveragingData(code=averaging_pb2.CANCELLED)


# -- paced group key manager -----------------------------------------------------------------------------------------
#
# How often a peer looks for others to average with, in the DHT.


#: Seconds between two looks for peers to average with.
SEARCH_EVERY = 0.1


class PacedGroupKeyManager(GroupKeyManager):
    """``hivemind``'s ``GroupKeyManager`` that looks for peers no more often than it has to, and lets no group wait.

    hivemind's peers look without a pause until they have found a group, which keeps a core busy. Then they do not begin
    to average until the DHT knows that they no longer look: three seconds, if one of its nodes does not answer.
    """

    _looked_at = _found_at = -math.inf
    _withdrawing: asyncio.Task[bool] | None = None

    async def get_averagers(self, *args: Any, **kwargs: Any) -> list[tuple[PeerID, float]]:
        await asyncio.sleep(self._looked_at + SEARCH_EVERY - time.monotonic())
        self._looked_at = time.monotonic()
        found = await super().get_averagers(*args, **kwargs)
        self._found_at = time.monotonic()
        return found

    @property
    def has_just_looked(self) -> bool:
        """Whether it knows who is there now; the DHT takes its time while one of its nodes does not answer."""
        return time.monotonic() - self._found_at < 5 * SEARCH_EVERY

    async def declare_averager(self, *args: Any, looking_for_group: bool = True, **kwargs: Any) -> bool:
        declaring = super().declare_averager(*args, looking_for_group=looking_for_group, **kwargs)
        if looking_for_group:
            return await declaring
        # one that comes too late is overruled by the next declaration, which expires later
        self._withdrawing = asyncio.create_task(declaring)
        self._withdrawing.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody asks for it
        return True


# -- search ----------------------------------------------------------------------------------------------------------
#
# A search for a group, as the peer that searches sees it: what it costs, and which leaders have let it wait.


#: Times in a search that a leader is asked which does not answer; two that ask each other let each other wait once.
ASKED_IN_VAIN = 2

#: Seconds after which a request that is given up is cancelled once more.
LOOKED_AT_EVERY = 0.1

#: What hivemind raises where a leader's answer is of no use.
_USELESS = (AssertionError, MatchmakingException, TypeError, ValueError)


class Waiting:
    """How long a peer's training has waited for a search: it goes on meanwhile until the round is due.

    :param step: the round, in the averager's process, before the search begins
    """

    def __init__(self, step: StepControl):
        self._began = time.monotonic()
        self._due: float | None = None
        step._trigger.add_done_callback(self._note_due)

    def _note_due(self, trigger: object) -> None:
        self._due = time.monotonic()

    @property
    def seconds(self) -> float:
        """Until now; 0 before the round is due."""
        return 0.0 if self._due is None else time.monotonic() - max(self._began, self._due)


@dataclass
class Request:
    """To be let into a leader's group.

    :param leader: who is asked
    :param until: when it is to begin, by the clock of the DHT
    :param timeout: seconds for its answer, and for its beginning
    :param began: when it was asked
    :param was_welcome: whether it has let this peer in, and has not sent it on to another leader
    """

    leaders: LeadersOfASearch
    leader: PeerID
    until: float
    timeout: float
    began: float
    was_welcome: bool = False

    def stalled_for(self, following: asyncio.Task[GroupInfo | None]) -> float | None:
        """Seconds for which the leader has let this peer wait for nothing; ``None`` if it has not.

        :param following: the request, which is over
        """
        seconds = time.monotonic() - self.began
        error = following.exception()
        if isinstance(error, _USELESS):
            self.leaders.give_up(self.leader)
            return seconds
        if isinstance(error, OSError):  # of the stream, which the leader may have broken off
            return None if self.leaders.note_silence(self.leader) else seconds
        if error is not None or following.result() is not None:
            return None
        if self.was_welcome and get_dht_time() >= self.until + self.timeout:
            self.leaders.give_up(self.leader)
            return seconds
        if not self.was_welcome and seconds >= self.timeout and not self.leaders.note_silence(self.leader):
            return seconds
        return None


class LeadersOfASearch:
    """The leaders that were asked in the search for one round.

    :param step: the round
    """

    def __init__(self, step: StepControl | None = None):
        self.step = step
        self._silent: Counter[PeerID] = Counter()
        self._request: Request | None = None

    def may_be_asked(self, leader: PeerID) -> bool:
        """Whether it has not let this peer wait in vain."""
        return self._silent[leader] < ASKED_IN_VAIN

    def ask(self, leader: PeerID, until: float, timeout: float) -> Request:
        """Note that a leader is asked; the one before has sent this peer on to it, if it was welcome there."""
        if self._request is not None:
            self._request.was_welcome, self._request.began = False, time.monotonic()
        self._request = Request(self, leader, until, timeout, time.monotonic())
        return self._request

    def note_welcome(self, leader: PeerID) -> None:
        """A leader has let this peer into its group."""
        if self._request is not None and self._request.leader == leader:
            self._request.was_welcome = True

    def note_silence(self, leader: PeerID) -> bool:
        """A leader has not answered. Whether it may be asked again."""
        self._silent[leader] += 1
        return self.may_be_asked(leader)

    def give_up(self, leader: PeerID) -> None:
        """Do not ask a leader again in this search."""
        self._silent[leader] = ASKED_IN_VAIN


async def give_up(following: asyncio.Task[Any]) -> None:
    """Cancel it until it has ended, whoever gives up waiting for that meanwhile.

    Before Python 3.12, ``asyncio.wait_for`` forgets that it was cancelled if what it waits for has arrived at that
    moment; a peer would search on, and no later search of its would ever begin.
    """
    is_cancelled = False
    while not following.done():
        following.cancel()
        try:
            await asyncio.wait({following}, timeout=LOOKED_AT_EVERY)
        except asyncio.CancelledError:
            is_cancelled = True
    if not following.cancelled():
        following.exception()  # else asyncio complains that nobody has asked for it
    if is_cancelled:
        raise asyncio.CancelledError


# -- matchmaking -----------------------------------------------------------------------------------------------------


#: Groups of which it is remembered who has left them.
REMEMBERED = 64

#: What follows the id of a group in that of what is left of it, before how many have left it, and their places.
_WITHOUT = b" without "


class EpochMatchmaking(Matchmaking):
    """``hivemind``'s matchmaking, in which a leader turns away whoever is at another epoch.

    hivemind's peers do not ask. One that has just joined, or has missed a round, then fills a place in the group of
    the others' next round: they wait for it, and average their gradients with those of an epoch that is over.

    Takes the parameters of ``hivemind``'s, in a running loop.
    """

    group_key_manager: PacedGroupKeyManager

    def __init__(self, p2p: P2P, schema_hash: bytes, dht: hivemind.DHT, *, initial_group_bits: str = "", **kwargs: Any):
        self._chosen_size: int | None = None
        self._expected: ExpectedPeers | None = None
        #: the last peer that was asked to lead, and the asking
        self._following: tuple[PeerID, asyncio.Task[GroupInfo | None]] | None = None
        #: set when one is over, and all is known of what has come of it
        self._searches: dict[StepControl, asyncio.Event] = {}
        #: whether the last leader of the search was asked whether it has begun, since the search was given up
        self._has_taken_leave = False
        #: followers that are being told that this peer, which leads them, has begun
        self._being_told: set[PeerID] = set()
        #: done when somebody has gone, has come, or has left a group; then there is another one
        self.news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        #: groups that this peer is in and that it has not begun to average with, by their ids
        self._awaiting_trigger: dict[bytes, tuple[StepControl, asyncio.Event, GroupInfo]] = {}
        self._early = EarlyBeginnings()
        #: ids of groups that this peer was in and has left before it began to average with them
        self._left: deque[bytes] = deque(maxlen=REMEMBERED)
        #: groups that others have left so, by their ids
        self._declined: deque[tuple[bytes, PeerID]] = deque(maxlen=REMEMBERED)
        #: of groups that this peer has not begun to average with, the ids by which others have, by the groups' own
        self._begun_by_others: dict[bytes, list[bytes]] = {}
        #: ids of groups of which this peer did not know yet that it is in them when others had begun already
        self._not_known_yet: deque[bytes] = deque(maxlen=REMEMBERED)
        #: peers that have said which epoch's round they look for, in a group with this one
        self._peers_of_ours: set[PeerID] = set()
        #: told what the others do
        self.tell: Callable[[RoundReport], None] = lambda report: None
        self._leaders = LeadersOfASearch()
        super().__init__(p2p, schema_hash, dht, initial_group_bits=initial_group_bits, **kwargs)
        # hivemind makes one of its own class, and has asked it for nothing yet
        self.group_key_manager = PacedGroupKeyManager(dht, self._prefix, initial_group_bits, self._chosen_size)

    @property
    def target_group_size(self) -> int | None:
        """Peers with which a group is complete: as many as the user has chosen, or all that can come to the round.

        Whoever comes unexpectedly, such as one that the tracker has not seen yet, takes nobody's place.
        """
        if self._chosen_size is not None or self._expected is None:
            return self._chosen_size
        expected = self._expected_at(self.step_control)
        present = {self.peer_id, *self.current_followers}
        # a group of one would turn everybody away; the key manager's own size stays open, it draws from it
        return min(max(2, len(expected | {peer.to_bytes() for peer in present})), LARGEST_GROUP)

    @target_group_size.setter
    def target_group_size(self, chosen: int | None) -> None:
        self._chosen_size = None if chosen is None else min(chosen, LARGEST_GROUP)

    async def look_for_group(self, step: StepControl) -> GroupInfo | None:
        if self._leaders.step is not step:  # else it is the same search, begun anew
            self._leaders = LeadersOfASearch(step)
        self._has_taken_leave = False
        waiting, expected = Waiting(step), self._expected_at(step)
        over = self._searches[step] = asyncio.Event()
        try:
            group = await super().look_for_group(step)
        finally:
            del self._searches[step]
            over.set()
        met = frozenset(peer.to_bytes() for peer in (() if group is None else group.peer_ids))
        missed = (expected & self._expected_at(step)) - met
        if missed and self._chosen_size is None and waiting.seconds >= NOTABLE:
            self.tell(RoundReport(epoch_of(step.data_for_gather) or 0, missed=missed, seconds=waiting.seconds))
        return group

    def _expected_at(self, step: StepControl | None) -> frozenset[bytes]:
        if self._expected is None:
            return frozenset()
        return self._expected.of_round(None if step is None else epoch_of(step.data_for_gather))

    def note_exchange(
        self, group: GroupInfo, notes: ExchangeNotes, overstating: Callable[[int], Collection[PeerID]], seconds: float
    ) -> None:
        """Tell who has taken part in a round, and who has let it wait, was refused or has put in less than it told.

        :param notes: of its exchanges
        :param overstating: tells, of an epoch, who has reported more samples than it has put in
        :param seconds: that it took
        """
        own = [gather for peer, gather in zip(group.peer_ids, group.gathered, strict=True) if peer == self.peer_id]
        others = {peer for peer in group.peer_ids if peer != self.peer_id}
        stalled = [peer for peer in notes.unreached if self.takes_part(peer, group.group_id)]
        stalled = stalled if seconds >= NOTABLE else []
        epoch = epoch_of(marked(own[0])) or 0  # by now, the group's records have lost their marks
        self.tell(
            RoundReport(
                epoch=epoch,
                took_part=_ids(others.difference(notes.unreached, notes.refused)),
                stalled=_ids(set(stalled).difference(notes.refused)),
                overstated=_ids(others.intersection(overstating(epoch))),
                refused=tuple((peer.to_bytes(), reason) for peer, reason in notes.refused.items() if peer in others),
                seconds=seconds if stalled else 0.0,
            )
        )

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        # Who is to lead is whoever began to look first; who does not look has an infinite time here. hivemind says so
        # only after the answer to a request of its own: two that ask each other, since one had not heard that the other
        # has begun anew, wait until request_timeout, and then until one of them begins anew again.
        if self.potential_leaders.declared_expiration_time > (request.expiration or math.inf):
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.BAD_EXPIRATION_TIME)
            return
        responses = super().rpc_join_group(request, context)
        try:
            # one that ends with the welcome is not answered to its end: this peer leaves
            async for message in left_open(responses, CLOSED_WITHIN, lambda last: last.code != averaging_pb2.ACCEPTED):
                if message.code == averaging_pb2.BEGIN_ALLREDUCE:
                    self._being_told.add(context.remote_id)
                yield message
        finally:
            self._being_told.discard(context.remote_id)

    def let_go(self, follower: PeerID) -> bool:
        """Know that a follower gives up its search.

        :returns: whether this peer has begun with it, which it will learn from the answer to its request
        """
        self.current_followers.pop(follower, None)
        has_assembled = self.assembled_group.done() and not self.assembled_group.cancelled()
        is_in = has_assembled and not self.assembled_group.exception() and follower in self.assembled_group.result()
        return is_in or follower in self._being_told

    def _check_reasons_to_reject(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> averaging_pb2.MessageFromLeader | None:
        reason = super()._check_reasons_to_reject(request, context)
        if reason is None and self._avoids(context.remote_id):
            return averaging_pb2.MessageFromLeader(code=averaging_pb2.NOT_LOOKING_FOR_GROUP)
        if reason is None and not is_readable(request.gather):
            return averaging_pb2.MessageFromLeader(code=averaging_pb2.PROTOCOL_VIOLATION)
        if reason is None and self.step_control is not None:
            own, theirs = epoch_of(self.step_control.data_for_gather), epoch_of(request.gather)
            if own is not None and theirs is not None and own != theirs:
                return averaging_pb2.MessageFromLeader(code=averaging_pb2.NOT_LOOKING_FOR_GROUP)
        return reason

    async def expect(self, peers: ExpectedPeers) -> None:
        """Let a group be complete as soon as these peers have met; one that is by now begins."""
        self._expected = peers
        self._tell_news()
        if self._following is not None and self._has_gone(self._following[0]):
            await give_up(self._following[1])
        async with self.lock_request_join_group:
            # hivemind looks at the size only when somebody joins, so one that has shrunk is looked at here
            if not self.is_looking_for_group or self.assembled_group.done():
                return
            if self.target_group_size is not None and len(self.current_followers) + 1 >= self.target_group_size:
                await self.leader_assemble_group()

    async def _request_join_group(self, leader: PeerID) -> GroupInfo | None:
        if self._has_gone(leader) or self._avoids(leader) or not self._leaders.may_be_asked(leader):
            return None
        until = math.inf if self.step_control is None else self.get_request_expiration_time()
        request = self._leaders.ask(leader, until, self.request_timeout)
        # on its own, so that the search may go on without it
        following = asyncio.create_task(super()._request_join_group(leader))
        self._following = leader, following
        try:
            await asyncio.wait({following})
        except asyncio.CancelledError:
            if self.assembled_group.cancelled() and not self._has_taken_leave:
                await self._take_leave(following)
            raise
        finally:
            await give_up(following)
        if following.cancelled():
            return None
        if (seconds := request.stalled_for(following)) is not None:
            step = self.step_control
            epoch = None if step is None else epoch_of(step.data_for_gather)
            self.tell(RoundReport(epoch or 0, stalled=frozenset({leader.to_bytes()}), seconds=seconds))
            return None
        return None if isinstance(following.exception(), OSError) else following.result()

    async def _take_leave(self, following: asyncio.Task[GroupInfo | None]) -> None:
        """Learn of the group with which a leader has begun that does not know yet that this peer has given up.

        Else nobody in it would know before the deadline that this peer has left it.

        :param following: the request, which its leader may have sent on to another one
        """
        self._has_taken_leave = True
        leader = None if self._following is None else self._following[0]
        if leader is None or self._has_gone(leader):
            return
        stub = self._servicer_type.get_stub(self._p2p, leader, namespace=self._prefix)
        asking = asyncio.create_task(has_begun(stub))
        try:
            await asyncio.wait({asking, following}, timeout=ANSWERED_WITHIN, return_when=asyncio.FIRST_COMPLETED)
            if asking.done() and asking.result():
                await asyncio.wait({following}, timeout=ANSWERED_WITHIN)
        finally:
            asking.cancel()

    @property
    def current_leader(self) -> PeerID | None:
        """The peer that has let this one into its group."""
        return self._current_leader

    @current_leader.setter
    def current_leader(self, leader: PeerID | None) -> None:
        self._current_leader = leader
        if leader is not None:
            self._leaders.note_welcome(leader)

    async def leader_assemble_group(self) -> GroupInfo:
        return self._await_trigger(await super().leader_assemble_group())

    async def follower_assemble_group(self, leader: PeerID, msg: averaging_pb2.MessageFromLeader) -> GroupInfo:
        if (reason := why_no_group(msg, self.peer_id)) is not None:
            raise MatchmakingException(f"{leader} has announced a group that is none: {reason}")
        if self.assembled_group.cancelled():  # the search was given up meanwhile, and whoever is in is to know
            peers = tuple(map(PeerID, msg.ordered_peer_ids))
            return self._await_trigger(GroupInfo(msg.group_id, peers, tuple(msg.gathered)))
        return self._await_trigger(await super().follower_assemble_group(leader, msg))

    def _await_trigger(self, group: GroupInfo) -> GroupInfo:
        self._awaiting_trigger[group.group_id] = self.step_control, asyncio.Event(), group
        if begun := [one for one in self._not_known_yet if one.startswith(group.group_id)]:
            self._begun_by_others[group.group_id] = begun
        self._early.note_group(self.step_control, group)
        sent = zip(group.peer_ids, group.gathered, strict=True)
        self._peers_of_ours.update(peer for peer, gather in sent if epoch_of(gather) is not None)
        return group

    def is_alone(self, epoch: float) -> bool:
        """Whether this peer looks for a group for the round of an epoch, follows nobody and leads nobody."""
        step = self.step_control
        is_looking = self.is_looking_for_group and self.group_key_manager.has_just_looked
        is_looking = is_looking and step is not None and epoch_of(step.data_for_gather) == epoch
        has_met = self.assembled_group.done() or self.current_leader or self.current_followers
        return is_looking and not has_met and not self.lock_request_join_group.locked()  # else it is being answered

    def give_up_if_alone(self, epoch: float) -> None:
        """End the search for the round of an epoch if nobody was met, and nobody is being asked."""
        step, is_asking = self.step_control, self._following is not None and not self._following[1].done()
        if step is not None and self.is_alone(epoch) and not is_asking:
            with suppress(InvalidStateError):  # it was cancelled just now
                step.cancel()

    def is_of_ours(self, peer: PeerID) -> bool:
        """Whether a peer is known not to be one of plain hivemind, since it has been in a group with this one."""
        return peer in self._peers_of_ours

    def begin(self, group_id: bytes) -> None:
        """Let those in that have sent data for a group already."""
        self._begun_by_others.pop(group_id, None)
        if group_id in self._awaiting_trigger:
            _, begun, _ = self._awaiting_trigger.pop(group_id)
            begun.set()

    def without_those_who_left(self, group: GroupInfo) -> GroupInfo:
        """What is left of a group that this peer is about to begin to average with, under an id of its own.

        Each of those who are left comes to the same, or follows who has begun before, and nothing is lost of what
        whoever has left would have averaged. Two who find that out in the same moment may differ, and average nothing.

        :param group: as it has met
        """
        whole, count = group.group_id, len(group.peer_ids)
        left = frozenset(number for number, peer in enumerate(group.peer_ids) if (whole, peer) in self._declined)
        for begun in self._begun_by_others.get(whole, ()):
            if (named := _left_out(begun, whole)) is None:
                return group  # somebody averages with all of it
            if named <= left:  # nobody is left out since somebody says so who has not left
                left = named
                break
        if not left or len(left) > count - 2 or not _all_learn_who_leaves(group):
            return group
        stays = [number not in left for number in range(count)]
        names = b"".join(number.to_bytes(2, "big") for number in (len(left), *sorted(left)))
        peers, gathered = (tuple(itertools.compress(all_, stays)) for all_ in (group.peer_ids, group.gathered))
        return GroupInfo(whole + _WITHOUT + names, peers, gathered)

    def to_be_left(self, group: GroupInfo) -> StepControl | None:
        """The round of a group in which this peer is to count for nothing, if the others do better without it.

        Nobody has begun then, and whoever begins averages without those who have left. In another group, this peer
        takes part without any weight: what it would average for the others would be lost to them.
        """
        step, _, _ = self._awaiting_trigger.get(group.group_id, (None, None, None))
        is_under_way = group.group_id in self._begun_by_others
        if step is None or step.weight != 0 or is_under_way or not _all_learn_who_leaves(group):
            return None
        return step

    def let_begin_early(self, epoch: int, answer: MPFuture[bool]) -> None:
        """Let the round of an epoch begin without its trigger, if its group agrees, and tell whether it does."""
        have_met = [(step, group) for step, _, group in self._awaiting_trigger.values()]
        self._early.allow(epoch, answer, have_met)

    async def leave(self, step: StepControl) -> list[GroupInfo]:
        """Send those away who wait for a group of that round: it is over, or it has failed.

        :returns: the groups that this peer has left before it began to average with them
        """
        if step in self._searches:
            await self._searches[step].wait()
        self._early.note_end(step)
        left = [group for own, _, group in self._awaiting_trigger.values() if own is step]
        for group in left:
            self._left.append(group.group_id)
            self.begin(group.group_id)
        return left

    async def wait_for_trigger(self, group_id: bytes) -> bool:
        """Return when this peer has begun to average with a group, at once if it waits for no trigger.

        :param group_id: as whoever sends data names it, maybe with a suffix for a phase of the round
        :returns: whether it takes part, as far as that can be told
        """
        waiting = {own_id: begun for own_id, (_, begun, _) in self._awaiting_trigger.items()}
        if not any(map(group_id.startswith, waiting)):
            self._not_known_yet.append(group_id)
        for own_id, begun in waiting.items():
            if group_id.startswith(own_id):
                self._begun_by_others.setdefault(own_id, []).append(group_id)
                await begun.wait()
        return not any(group_id.startswith(left) for left in self._left)

    def decline(self, group_id: bytes, peer: PeerID) -> None:
        """Know that a peer has left a group."""
        if group_id:  # else it would leave all groups
            self._declined.append((group_id, peer))
            self._tell_news()

    def _tell_news(self) -> None:
        news, self.news = self.news, asyncio.get_running_loop().create_future()
        news.set_result(None)

    def takes_part(self, peer: PeerID, group_id: bytes) -> bool:
        """Whether something is to be expected from a peer, as far as is known.

        :param group_id: maybe with a suffix for a phase of the round
        """
        has_left = any(one == peer and group_id.startswith(left) for left, one in self._declined)
        return not has_left and not self._has_gone(peer) and not self._avoids(peer)

    def _avoids(self, peer: PeerID) -> bool:
        return self._expected is not None and peer.to_bytes() in self._expected.avoided

    def _has_gone(self, peer: PeerID) -> bool:
        return self._expected is not None and peer.to_bytes() in self._expected.gone


def _left_out(group_id: bytes, whole: bytes) -> frozenset[int] | None:
    """The places of those without whom somebody averages; ``None`` if with all that are in the group.

    :param group_id: by which that is named, maybe with a suffix for a phase of the round
    :param whole: the group's own id
    """
    if not group_id.startswith(whole + _WITHOUT):
        return None
    numbers = group_id[len(whole + _WITHOUT) :]
    found = [int.from_bytes(numbers[at : at + 2], "big") for at in range(0, len(numbers), 2)]
    return frozenset(found[1 : 1 + found[0]]) if found else frozenset()


def _all_learn_who_leaves(group: GroupInfo) -> bool:
    """Whether all in a group are of ours, are told who leaves it, and tell by their numbers that they have begun."""
    return all(epoch_of(one) is not None and averages_its_own(one) for one in group.gathered)


def _ids(peers: Collection[PeerID]) -> frozenset[bytes]:
    return frozenset(peer.to_bytes() for peer in peers)
