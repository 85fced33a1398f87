"""Who of those on the swarm's list is really there: whoever has not reported for some time is asked.

A peer that leaves without a goodbye stays on the list until its last report expires, and each round of the others
would wait for it until the deadline of matchmaking. A client is asked, too: it cannot be dialled, but as long as it is
there it holds a connection to the peers that it averages with.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import hivemind
from hivemind.dht import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.p2p import P2PDaemonError, P2PHandlerError, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MPFuture, get_dht_time, get_logger

from hivenb.engine.network.node import Protocol

# -- pace ------------------------------------------------------------------------------------------------------------
#
# How often a peer looks at the swarm, reports itself, and asks who is there: the more peers, the more seldom.


#: Seconds between two looks at least for each peer that is there: each has all their reports checked by the others.
LOOK_PERIOD_OF_PEER = 0.05

#: Seconds between two looks at most: a newcomer is to be seen before its second epoch (hivemind's own is 10).
MAX_REFRESH_PERIOD = 3.0

#: Seconds between two reports of one epoch, at least. The others know the speed of this peer and reckon with it
#: meanwhile: it reports early only when they are misled.
MISLED, AS_RECKONED = 0.1, 1.0

#: Seconds of this peer's work by which it may be ahead of what the others reckon with, or behind.
MISLED_BY = 0.1

#: Seconds by which a report may seem to come from the future, and that the quickest one of a peer may be under way:
#: beyond them, that peer has another clock.
AHEAD, UNDER_WAY = 0.1, 1.5

#: Seconds by which a report may be late, at least, before its peer is asked whether it is there.
LATE = 0.2


@dataclass(frozen=True)
class Pace:
    """Of each peer, so that what reports cost it does not grow with the swarm.

    :param peers: that there are
    """

    peers: int = 1

    @cached_property
    def look_period(self) -> float:
        """Seconds between two looks at least."""
        return min(LOOK_PERIOD_OF_PEER * self.peers, MAX_REFRESH_PERIOD)

    @cached_property
    def report_period(self) -> float:
        """Seconds between two reports of one epoch, if all goes as the others reckon: one for each of their looks."""
        return max(AS_RECKONED, self.look_period)

    @property
    def silence(self) -> float:
        """Seconds without a new report after which a peer is asked whether it is there."""
        return self.report_period + max(LATE, self.look_period / 2)

    def report_due_after(self, now: LocalTrainingProgress, reported: LocalTrainingProgress) -> float:
        """Seconds from a report to the next one, if nothing happens in between.

        :param now: how far the peer is
        :param reported: what the others know of it
        """
        if now.epoch != reported.epoch:
            return 0.0
        reckoned = reported.samples_accumulated + (now.time - reported.time) * reported.samples_per_second
        is_misled = abs(now.samples_accumulated - reckoned) > MISLED_BY * now.samples_per_second
        return max(MISLED, self.look_period / 2) if is_misled else self.report_period


# -- round trips -----------------------------------------------------------------------------------------------------
#
# How long a peer's answers take, smoothed as TCP smooths it (RFC 6298), so that deadlines follow the line.


#: Weights of the newest answer, in what is usual and in how far answers are from that.
_ALPHA, _BETA = 1 / 8, 1 / 4

#: Deviations beyond the usual that an answer may take.
_DEVIATIONS = 4

#: Answers after which the quickest one is not of a busy moment, or of a connection that was only made for it.
ENOUGH = 3


@dataclass
class RoundTrips:
    """Of one peer.

    :param usual: seconds from a question to its answer; 0 before the first
    :param deviation: seconds by which answers are usually earlier or later
    :param least: seconds of the quickest answer
    :param count: of answers
    """

    usual: float = 0.0
    deviation: float = 0.0
    least: float = math.inf
    count: int = 0

    def note(self, seconds: float) -> None:
        """Know how long an answer took."""
        self.count += 1
        self.least = min(self.least, seconds)
        if self.usual == 0:
            self.usual, self.deviation = seconds, seconds / 2
            return
        self.deviation += _BETA * (abs(seconds - self.usual) - self.deviation)
        self.usual += _ALPHA * (seconds - self.usual)

    @property
    def longest(self) -> float:
        """Seconds within which an answer comes as long as nothing gets lost; 0 before the first."""
        return self.usual + _DEVIATIONS * self.deviation

    @property
    def is_known(self) -> bool:
        """Whether there were answers enough to tell the length of the line."""
        return self.count >= ENOUGH

    @property
    def line(self) -> float:
        """Seconds there and back on the line itself; 0 as long as it is not known."""
        return self.least if self.is_known else 0.0


# -- failure detector ------------------------------------------------------------------------------------------------


logger = get_logger(__name__)

#: Seconds between two questions to a peer that has gone or never answers, and of silence after which that one has gone.
TRY_AGAIN_AFTER = 5.0

#: Seconds for which a peer is remembered that is not on the list: a look may miss it.
REMEMBERED_FOR = 20.0

#: Seconds for an answer, at least.
ANSWER_WITHIN = 1.0

#: Seconds for an answer, at most, for each that is given to a peer on a short line.
LONGEST_LINE = 2.0

#: Seconds by which two clocks may drift apart in a second.
DRIFT = 1e-3

#: Questions that a peer has not answered, which never did, before no round waits for it.
MOST_FAILURES = 2

#: Peers that have not answered yet, at most, for which rounds wait. All do within moments of the first look at them,
#: and of one attacker's there may be thousands.
FLOOD = 8

#: Peers at most that are counted before they have answered for the first time.
MAX_UNREACHED = 64

#: Questions under way at a time; in a large swarm of slow peers nearly everybody is silent for a second.
MAX_QUESTIONS = 8


@dataclass
class _Sighting:
    """What is known of a peer.

    :param behind: seconds by which its clock is behind ours, or more, as a report takes its time
    :param looked_at: when that was last found out
    :param reported_at: time of its last report, by our clock; it may be seen long after, as one that does not answer
      holds up the DHT as well
    :param asked_at: when it was last asked
    :param was_reached: whether it has ever answered; one that we could never reach may be there for others
    :param failures: questions in a row that it has not answered
    :param is_gone: whether it could be reached before, and no longer can, or was gone before we came
    :param answer: to a question that is under way
    :param round_trips: how long its answers take
    """

    behind: float = math.inf
    looked_at: float = -math.inf
    reported_at: float = -math.inf
    asked_at: float = -math.inf
    was_reached: bool = False
    failures: int = 0
    is_gone: bool = False
    answer: MPFuture | None = None
    round_trips: RoundTrips = field(default_factory=RoundTrips)

    def answers_within(self, gone_after: float) -> float:
        """Seconds that a question is given.

        TCP sends what got lost in a stall only after as long a time again, and answers of a long line are late anyway.
        """
        least = max(ANSWER_WITHIN, gone_after)
        return min(least + self.round_trips.longest, LONGEST_LINE * least)

    def take_in(self, seconds: float, silence: float) -> None:
        """Know what has come of a question.

        :param seconds: until it was answered; infinite if it was not
        :param silence: since the last report
        """
        is_reached = math.isfinite(seconds)
        if is_reached:
            self.round_trips.note(seconds)
        self.was_reached |= is_reached
        self.failures = 0 if is_reached else self.failures + 1
        self.is_gone = not is_reached and (self.was_reached or silence >= TRY_AGAIN_AFTER)

    def is_to_be_asked(self, silence: float, ask_after: float) -> bool:
        """Whether it is time for a question.

        :param silence: seconds since the last report
        :param ask_after: of silence that it takes, and between two questions
        """
        is_in_doubt = not self.was_reached and self.failures >= MOST_FAILURES
        pause = TRY_AGAIN_AFTER if self.is_gone or is_in_doubt else ask_after
        is_silent = silence >= ask_after or not self.round_trips.is_known
        return self.answer is None and is_silent and time.monotonic() - self.asked_at >= pause


class FailureDetector:
    """Watches the peers of a swarm. To be used by one thread.

    :param dht: which asks them
    """

    def __init__(self, dht: hivemind.DHT):
        self._dht = dht
        self._sightings: dict[bytes, _Sighting] = {}

    def find_gone(
        self,
        reports: Iterable[LocalTrainingProgress],
        gone_after: float,
        ask_after: float = Pace().silence,
        unread: float = 0.0,
    ) -> frozenset[bytes]:
        """Ids of the peers that have gone without a goodbye. Does not wait: whoever is asked now is known later.

        :param reports: the last one of each peer, without this one's own
        :param gone_after: seconds without an answer after which a peer on a short line has gone, though nobody has
          ended the connection, such as one whose network was cut
        :param ask_after: seconds without a new report after which a peer is asked, and between two questions to it. One
          that trains reports more often, unless its batches take longer
        :param unread: seconds since those reports were read in which nobody has looked for newer ones: they are no
          silence of anybody's
        """
        now = time.monotonic()
        listed = {report.peer_id: report for report in reports}
        for peer in [peer for peer, one in self._sightings.items() if now - one.looked_at > REMEMBERED_FOR]:
            del self._sightings[peer]
        for peer in listed:
            self._sightings.setdefault(peer, _Sighting())
        # whoever was asked longest ago comes first, as there may not be room for a question to everybody
        for peer in sorted(listed, key=lambda peer: self._sightings[peer].asked_at):
            sighting = self._sightings[peer]
            if sighting.is_to_be_asked(self._note(listed[peer], sighting, unread), ask_after):
                self._ask(listed[peer], sighting, sighting.answers_within(gone_after))
        return frozenset(peer for peer in listed if self._sightings[peer].is_gone)

    def in_doubt(self, peer: bytes) -> bool:
        """Whether no round should wait for a peer that has never answered: it may be there for others, or not at all.

        That is so when it was asked twice, or is one of a flood.
        """
        sighting = self._sightings.get(peer)
        if sighting is None or sighting.was_reached:
            return False
        return sighting.failures >= MOST_FAILURES or len(self._unreached) > FLOOD

    def too_many(self) -> frozenset[bytes]:
        """Ids of those that have never answered, beyond those who were seen first."""
        return frozenset(self._unreached[MAX_UNREACHED:])

    def by_own_clock(self, report: LocalTrainingProgress) -> LocalTrainingProgress:
        """A report as if its peer had this machine's clock, if the two differ as far as its reports tell.

        hivemind reckons what a peer has done since: with a clock that is behind, it has done as much more, and one that
        is ahead does nothing.
        """
        sighting = self._sightings.get(report.peer_id)
        if sighting is None:
            return report
        quickest = sighting.behind + get_dht_time() - time.monotonic()
        if not math.isfinite(quickest) or -AHEAD <= quickest <= UNDER_WAY:
            return report
        return LocalTrainingProgress(**{**report.dict(), "time": report.time + quickest})

    @property
    def answering(self) -> int:
        """How many have ever answered."""
        return sum(one.was_reached for one in self._sightings.values())

    @property
    def round_trip(self) -> float:
        """Seconds there and back on the longest line to a peer that is there; 0 if none is known."""
        return max((one.round_trips.line for one in self._sightings.values() if not one.is_gone), default=0.0)

    @property
    def _unreached(self) -> list[bytes]:
        return [peer for peer, one in self._sightings.items() if not one.was_reached]

    def _note(self, report: LocalTrainingProgress, sighting: _Sighting, unread: float) -> float:
        """Know what is new of a peer; gives the seconds for which it has been silent."""
        now = time.monotonic()
        sighting.behind = min(sighting.behind + DRIFT * (now - sighting.looked_at), now - report.time)
        sighting.looked_at = now
        sighting.reported_at = report.time + sighting.behind
        silence = now - sighting.reported_at - unread
        if sighting.reported_at > sighting.asked_at and sighting.was_reached:
            sighting.is_gone, sighting.answer = False, None  # the report says more
        if sighting.answer is not None and sighting.answer.done():
            if (seconds := _answer(sighting.answer)) is not None:
                sighting.take_in(seconds, silence)
            sighting.answer = None
        return silence

    def _ask(self, report: LocalTrainingProgress, sighting: _Sighting, within: float) -> None:
        answers = (other.answer for other in self._sightings.values())
        if sum(answer is not None and not answer.done() for answer in answers) >= MAX_QUESTIONS:
            return
        sighting.asked_at = time.monotonic()
        question = partial(seconds_to_answer, PeerID(report.peer_id), report.client_mode, within)
        try:
            sighting.answer = self._dht.run_coroutine(question, return_future=True)
        except OSError as e:
            logger.debug(f"The DHT was closed first: {e!r}")


async def seconds_to_answer(peer: PeerID, is_client: bool, within: float, dht: hivemind.DHT, node: DHTNode) -> float:
    """In the DHT's process: how long a peer takes to answer; infinite if it does not.

    :param is_client: whether it accepts no connections, so that it can be asked only over one of its own
    :param within: seconds, and beyond that what its last answers to the DHT have earned it
    """
    if is_client and not await _is_connected(peer, node):
        return math.inf
    request = dht_pb2.PingRequest(peer=node.protocol.node_info, validate=False)
    stub = DHTProtocol.get_stub(node.protocol, peer)
    within += node.protocol.timeouts.beyond(peer) if isinstance(node.protocol, Protocol) else 0.0
    for _ in range(2):  # the first question may go into a connection that is about to be closed
        asked_at = time.monotonic()
        try:
            await stub.rpc_ping(request, timeout=within)
        except P2PDaemonError as e:
            if not await _is_connected(peer, node):
                logger.debug(f"{peer} cannot be dialled: {e!r}")
                continue
            # a client's answer: that it does not know the question
        except P2PHandlerError as e:
            logger.debug(f"{peer} is there, and answers that it has failed: {e!r}")
        except asyncio.TimeoutError:
            logger.debug(f"{peer} does not answer within {within} s")
            break
        return time.monotonic() - asked_at
    return math.inf


async def _is_connected(peer: PeerID, node: DHTNode) -> bool:
    return any(connected.peer_id == peer for connected in await node.p2p.list_peers())


def _answer(future: Any) -> float | None:
    try:
        return future.result()
    except Exception as e:
        logger.debug(f"A peer could not be asked: {e!r}")
        return None
