"""What each peer has done in rounds, and for whom nobody waits any more."""

from __future__ import annotations

import math
import pickle
import socket
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from hivemind.p2p import PeerID

# -- round reports -----------------------------------------------------------------------------------------------------
#
# What the others did in a round: told by the averager's process, in which it is seen, to the one that trains.


#: Peers that one report names of each sort, of those that were refused fewer.
MOST_NAMED, MOST_REFUSED = 256, 16

#: Bytes of a report, at most.
_LARGEST = 1 << 17

#: Characters of a reason; some of it is what a peer has sent.
LONGEST_REASON = 120

#: Seconds of waiting that are worth a word.
NOTABLE = 0.5


@dataclass(frozen=True)
class RoundReport:
    """Of one round, or of the search for its group. Peers are told by their ids.

    :param epoch: that it was a round of
    :param took_part: peers whose data and averages have arrived
    :param missed: peers for which this one has waited, and which have not come
    :param stalled: peers in whose group it was, and which have let it wait
    :param overstated: peers that have reported samples of which they have not put half into this round
    :param refused: peers that have sent what was not taken, and why
    :param seconds: that this peer's training has lost by waiting
    """

    epoch: int
    took_part: frozenset[bytes] = frozenset()
    missed: frozenset[bytes] = frozenset()
    stalled: frozenset[bytes] = frozenset()
    overstated: frozenset[bytes] = frozenset()
    refused: tuple[tuple[bytes, str], ...] = ()
    seconds: float = 0.0


_SETS = ("took_part", "missed", "stalled", "overstated")


class RoundReportPipe:
    """Round reports on their way from a process that is forked to the one that has made this. Neither ever waits."""

    def __init__(self) -> None:
        # a pipe takes what is longer than a page in pieces, and may have room for half a report
        self._out, self._in = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._out, self._in):
            end.setblocking(False)
            weakref.finalize(self, end.close)

    def tell(self, report: RoundReport) -> None:
        """Write one; lost if nobody has read for long."""
        named = {name: _some(getattr(report, name)) for name in _SETS}
        refused = tuple((peer, reason[:LONGEST_REASON]) for peer, reason in report.refused[:MOST_REFUSED])
        with suppress(OSError):
            self._in.send(pickle.dumps(RoundReport(report.epoch, **named, refused=refused, seconds=report.seconds)))

    def take(self) -> list[RoundReport]:
        """All that were written since the last call."""
        taken: list[RoundReport] = []
        with suppress(OSError):
            while told := self._out.recv(_LARGEST):
                taken.append(pickle.loads(told))
        return taken


def _some(peers: Iterable[bytes]) -> frozenset[bytes]:
    return frozenset(sorted(peers)[:MOST_NAMED])


# -- reliability -------------------------------------------------------------------------------------------------------


#: Rounds in a row that a peer may miss, or stall, before it is excluded.
TOLERATED = 1

#: Rounds that it may stall, and take part in others in between, before it is excluded; they are forgotten after so many
#: seconds without another one. A peer that restarts its parts more often than this has failed by itself.
TOLERATED_STALLS, STALLS_COUNT_FOR = 4, 300.0

#: For how many times as long as a peer has kept this one waiting nobody waits for it: it costs a ninth of the time at
#: most, for however long it goes on.
PAUSE_FOR_WAITING = 8

#: Seconds for which a peer is excluded that has sent what was refused; twice as many the next time, and so on.
PAUSE_FOR_REFUSED = 10.0

#: Times that a pause grows.
MOST_PAUSES = 10

#: Seconds after a round with others for which a peer counts as one that trains with them.
AVERAGED_WITHIN = 60.0

#: What those do who are blamed, as it is said.
_MISSED, _STALLED = "missed", "stalled"
_OVERSTATED = "put in less than half of the samples that it reported,"

#: Peers that are remembered; those that have done nothing wrong are not.
MOST_REMEMBERED = 1024


@dataclass(frozen=True)
class ExcludedPeer:
    """A peer for which no round waits.

    :param peer: its id
    :param reason: why, in words; some of them may be what it has sent
    :param epochs: in how many it is waited for again, at the earliest
    :param seconds: after how many, at the earliest
    :param is_avoided: whether it is not let into groups either
    """

    peer: bytes
    reason: str
    epochs: int
    seconds: float
    is_avoided: bool

    def __str__(self) -> str:
        if math.isinf(self.seconds):
            return self.reason
        if self.epochs <= 0 and self.seconds <= 0:
            return f"{self.reason}; asked again now"
        epochs = f"{self.epochs} epoch{'' if self.epochs == 1 else 's'}" if self.epochs > 0 else ""
        seconds = f"{self.seconds:.0f} s" if self.seconds >= 1 else ""
        return f"{self.reason}; asked again in {' and '.join(filter(None, (epochs, seconds))) or '1 s'}"


def blocked_by_hand(peer: bytes) -> ExcludedPeer:
    """One that is excluded until it is unblocked."""
    return ExcludedPeer(peer, "blocked by hand", 0, math.inf, is_avoided=True)


def banned(peer: bytes) -> ExcludedPeer:
    """One that was banned from the swarm."""
    return ExcludedPeer(peer, "banned", 0, math.inf, is_avoided=True)


@dataclass
class _Record:
    """Of one peer.

    :param in_a_row: updates that it has missed or stalled since it has last taken part, by the sort of the first round
    :param last: epochs of the rounds of the last of them, by their sort
    :param stalled_at: of those that it has stalled, since it has last taken part
    :param stalls: rounds that it has stalled of late, one of each update
    :param last_stall: when that was last
    :param waited: seconds for which it has kept this peer waiting
    :param pauses: how often it was excluded
    :param began: the epoch since which it is excluded
    :param until_epoch: the epoch until which it is
    :param until: the time until which it is
    """

    in_a_row: dict[str, int] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)
    stalled_at: dict[str, int] = field(default_factory=dict)
    stalls: int = 0
    last_stall: float = -math.inf
    waited: float = 0.0
    pauses: int = 0
    began: int = 0
    until_epoch: int = 0
    until: float = 0.0
    reason: str = ""
    is_avoided: bool = False

    def is_of_last_update(self, sort: str, epoch: int) -> bool:
        """Whether a round belongs to the same update as the last that it has missed or stalled, in the other sort.

        Who dies in the middle of an update lets both its rounds wait: their groups are found at the same time.
        """
        return bool(self.last) and sort not in self.last and all(abs(epoch - at) <= 1 for at in self.last.values())


class PeerReliability:
    """Remembers who has missed rounds, has stalled them, or has sent what was refused. For one thread.

    Whoever has done so is excluded for a while that grows each time. That is forgiven when it has taken part again.

    :param clock: tells the time, in seconds
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._records: dict[bytes, _Record] = {}
        self._met_at: dict[bytes, float] = {}

    def note(self, sort: str, report: RoundReport) -> None:
        """Take in what peers did in a round.

        :param sort: of the round: of gradients, or of the state
        """
        now = self._clock()
        self._met_at = {peer: at for peer, at in self._met_at.items() if now - at < AVERAGED_WITHIN}
        for peer in report.took_part - report.overstated:
            self._met_at[peer] = now
            self._forgive(sort, peer, report.epoch)
        for what, peers in ((_MISSED, report.missed), (_STALLED, report.stalled)):
            for peer in peers - report.took_part:
                self._blame(sort, peer, report, what)
        for peer in report.overstated:
            self._blame(sort, peer, report, _OVERSTATED)
        for peer, reason in report.refused:
            record = self._record_of(peer)
            record.in_a_row[sort] = TOLERATED + 1
            self._exclude(record, report.epoch, reason, is_avoided=True)
            record.until = self._clock() + PAUSE_FOR_REFUSED * 2.0 ** (record.pauses - 1)

    def reset(self) -> None:
        """Begin anew with everybody: what they did says nothing of what they will do."""
        self._records.clear()

    def excluded_peers(self, epoch: int) -> tuple[ExcludedPeer, ...]:
        """All that are excluded at present.

        :param epoch: of this peer
        """
        now = self._clock()
        return tuple(
            ExcludedPeer(
                peer, record.reason, record.until_epoch - epoch, max(0.0, record.until - now), record.is_avoided
            )
            for peer, record in self._records.items()
            # an epoch before the one in which that began: this peer has gone back
            if (record.began <= epoch < record.until_epoch) or now < record.until
        )

    def has_averaged_with(self, among: Collection[bytes]) -> bool:
        """Whether this peer has averaged of late with one of those.

        :param among: ids of peers
        """
        now = self._clock()
        return any(now - self._met_at.get(peer, -math.inf) < AVERAGED_WITHIN for peer in among)

    def _forgive(self, sort: str, peer: bytes, epoch: int) -> None:
        record = self._records.get(peer)
        # one that lets the others wait in its own group, and then comes to theirs, has stalled the round all the same
        if record is None or record.stalled_at.get(sort) == epoch:
            return
        record.in_a_row.pop(sort, None)
        if any(count > TOLERATED for count in record.in_a_row.values()):
            return  # it comes to the rounds of one sort, and lets those of the other one wait
        record.until_epoch, record.until, record.is_avoided = 0, 0.0, False
        record.last.clear()
        record.stalled_at.clear()
        record.pauses //= 2
        if self._clock() - record.last_stall >= STALLS_COUNT_FOR:
            record.waited, record.stalls = 0.0, 0
            if not record.pauses and not record.in_a_row:
                del self._records[peer]

    def _blame(self, sort: str, peer: bytes, report: RoundReport, what: str) -> None:
        record = self._record_of(peer)
        record.waited += report.seconds
        is_first = not record.is_of_last_update(sort, report.epoch)
        if is_first:
            record.last.clear()
            record.in_a_row[sort] = record.in_a_row.get(sort, 0) + 1
        if what == _STALLED:
            record.stalls += is_first or not record.stalled_at
            record.stalled_at[sort], record.last_stall = report.epoch, self._clock()
        record.last[sort] = report.epoch
        # who has stalled answers, and sends nothing: that of the state's round is no other matter
        count = sum(record.in_a_row.values()) if record.stalled_at else record.in_a_row.get(sort, 0)
        if count > TOLERATED:
            reason = f"{what} {count} rounds in a row"
        elif record.stalls > TOLERATED_STALLS:
            reason = f"stalled {record.stalls} rounds of late"
        else:
            return
        self._exclude(record, report.epoch, reason, is_avoided=bool(record.stalled_at))
        record.until = self._clock() + PAUSE_FOR_WAITING * record.waited

    def _exclude(self, record: _Record, epoch: int, reason: str, is_avoided: bool) -> None:
        record.pauses = min(record.pauses + 1, MOST_PAUSES)
        record.began, record.until_epoch = epoch, epoch + 1 + 2**record.pauses
        record.reason, record.is_avoided = reason, is_avoided

    def _record_of(self, peer: bytes) -> _Record:
        if peer not in self._records and len(self._records) >= MOST_REMEMBERED:
            del self._records[next(iter(self._records))]
        return self._records.setdefault(peer, _Record())


# -- exchange notes --------------------------------------------------------------------------------------------------
#
# What a peer has seen of the others while it exchanged data with them in a round.


@dataclass
class ExchangeNotes:
    """Of the exchanges of one round, in the averager's process. Peers are told by their ids.

    :param unreached: those whose data, or whose averages, have not arrived
    :param refused: why what a peer has sent was not taken, in words
    :param weights: which a sender claims, and with which it counts
    """

    unreached: set[PeerID] = field(default_factory=set)
    refused: dict[PeerID, str] = field(default_factory=dict)
    weights: dict[PeerID, tuple[float, float]] = field(default_factory=dict)

    def take_in(self, other: ExchangeNotes) -> None:
        """Add those of another exchange of the same round."""
        self.unreached |= other.unreached
        self.refused |= other.refused
        self.weights |= other.weights

    @property
    def claimed(self) -> Mapping[PeerID, float]:
        """The weights that senders claim."""
        return {peer: claimed for peer, (claimed, _) in self.weights.items()}

    def lines(self, implausible: Collection[PeerID] = ()) -> Mapping[PeerID, str]:
        """What to say of those of whom something was not taken.

        Nothing of a weight that is bounded in all honesty: reports are older than what a peer puts into a round.

        :param implausible: those whose weight no honest peer has
        """
        lines = {peer: f"{peer} is excluded from a round: {reason}" for peer, reason in self.refused.items()}
        for peer in implausible:
            claimed, counted = self.weights[peer]
            words = f"counts with a weight of {counted:.4g} in a round, not with the {claimed:.4g} that it claims"
            why = "a peer's weight is the samples that it has reported, and 1 for its state"
            lines.setdefault(peer, f"{peer} {words}: {why}")
        return lines
