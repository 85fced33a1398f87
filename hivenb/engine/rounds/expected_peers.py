"""Which peers a round of averaging waits for: those that were there for its epoch, are no further, and are not gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hivemind.optim.progress_tracker import LocalTrainingProgress


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
    :param left_out: ids of those for which nobody waits, as they have kept others waiting
    :param avoided: ids of those that are not let into groups either
    :param ahead: by how much the number of a round is ahead of what its peers report while they look for each other
    :param follows: by how much it is ahead of the epoch that its peers have trained in
    """

    present: frozenset[Attendance]
    gone: frozenset[bytes] = frozenset()
    ahead: int = 0
    follows: int = 0
    left_out: frozenset[bytes] = frozenset()
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

    def call(self, reports: Sequence[LocalTrainingProgress]) -> frozenset[Attendance]:
        """Those that are there and can take part in rounds.

        :param reports: the newest one of each other peer
        """
        self.newest_epoch = newest = max((report.epoch for report in reports), default=0)
        # one that a look has missed is remembered for an epoch
        self._known = {peer: known for peer, known in self._known.items() if known.epoch >= newest - 1}
        present = [report for report in reports if report.epoch >= newest - 1]
        for report in present:
            known = self._known.get(report.peer_id)
            since = report.epoch if known is None else min(known.since, report.epoch)
            self._known[report.peer_id] = Attendance(report.peer_id, since, report.epoch)
        self.oldest_epoch = min((report.epoch for report in present), default=0)
        return frozenset(self._known[report.peer_id] for report in present)
