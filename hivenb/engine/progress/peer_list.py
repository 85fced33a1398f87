"""The swarm's list of peers as it was read last: who is on it, and who of them is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import hivemind
from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.p2p import PeerID
from hivemind.utils import ValueWithExpiration

from hivenb.engine.progress.failure_detector import FLOOD, FailureDetector
from hivenb.engine.progress.pace import Pace
from hivenb.engine.progress.peer_reports import Look, as_infos, parse_reports

#: Called with the reports of peers and the ids of those that have gone; gives the ids of those who do not count.
OnLook = Callable[[Sequence[LocalTrainingProgress], frozenset[bytes]], frozenset[bytes]]


class PeerList:
    """What a tracker knows of the others. For the tracker's thread; any may read :attr:`look`.

    :param dht: which asks them whether they are there
    """

    def __init__(self, dht: hivemind.DHT):
        self._own_id = dht.peer_id
        self._detector = FailureDetector(dht)
        self._others: list[LocalTrainingProgress] = []
        self._gone: frozenset[bytes] = frozenset()
        self._uncounted: frozenset[bytes] = frozenset()
        self._keys: dict[bytes, Any] = {}
        #: the newest look at the swarm; ``None`` before the first
        self.look: Look | None = None
        #: seconds there and back on the longest line to another peer; 0 if that is not known. Any thread may read it
        self.round_trip = 0.0
        #: how often each of them reports, and looks. Any thread may read it
        self.pace = Pace()
        #: called each time the swarm was looked at, with the newest reports of the others whom rounds may wait for, and
        #: the ids of those that have gone without a goodbye; says whose reports do not count
        self.on_look: OnLook | None = None

    def take_in(self, record: Any, own_key: bytes, gone_after: float) -> dict[Any, LocalTrainingProgress]:
        """What those peers have reported that are there, and that count, by their public keys.

        :param record: as the DHT gave it
        :param own_key: of this peer
        :param gone_after: seconds without an answer after which a peer has gone, if its line is short
        """
        reports = self._one_of_each(reports_in(record))
        others = [report for key, report in reports.items() if key != own_key]
        # a flood of those that are none, and never answer, is not to slow the others down
        self.pace = Pace(1 + min(len(others), FLOOD + self._detector.answering))
        gone = self._detector.find_gone(others, gone_after, self.pace.silence)
        too_many = self._detector.too_many()
        self.round_trip = self._detector.round_trip
        reports = {key: report for key, report in reports.items() if report.peer_id not in too_many}
        self._others = [report for report in others if report.peer_id not in too_many]
        self._tell_who_is_there(Look(time.monotonic(), as_infos(reports.values(), self._own_id)), gone)
        left = self._gone | self._uncounted
        return {key: report for key, report in reports.items() if report.peer_id not in left}

    def _one_of_each(self, reports: dict[Any, LocalTrainingProgress]) -> dict[Any, LocalTrainingProgress]:
        """Of several that name one peer, the one under the key that did so first."""
        self._keys = {peer: key for peer, key in self._keys.items() if key in reports}
        for key, report in reports.items():
            self._keys.setdefault(report.peer_id, key)
        return {key: report for key, report in reports.items() if self._keys[report.peer_id] == key}

    def look_for_the_gone(self, gone_after: float, reading_since: float) -> None:
        """See whether somebody has gone since the last look; a peer that does not answer holds up the next one.

        :param gone_after: as in :meth:`take_in`
        :param reading_since: when the next look has begun, on :func:`time.monotonic`
        """
        if self.look is None:
            return
        unread = max(0.0, reading_since - self.look.taken_at)
        gone = self._detector.find_gone(self._others, gone_after, self.pace.silence, unread)
        if gone != self._gone:
            self._tell_who_is_there(self.look, gone)

    def _tell_who_is_there(self, look: Look, gone: frozenset[bytes]) -> None:
        self._gone = gone
        if self.on_look is not None:
            here = [report for report in self._others if report.peer_id not in gone]
            self._uncounted = self.on_look([one for one in here if not self._detector.in_doubt(one.peer_id)], gone)
        self.look = replace(look, gone=_names(gone), uncounted=_names(self._uncounted))


def _names(peers: frozenset[bytes]) -> frozenset[str]:
    return frozenset(PeerID(peer).to_base58() for peer in peers)


def reports_in(record: Any) -> dict[Any, LocalTrainingProgress]:
    """The reports in what the DHT has found, by their public keys."""
    found = record.value if isinstance(record, ValueWithExpiration) else record
    return parse_reports(found) if isinstance(found, Mapping) else {}
