"""How much a sender may count for in an average of gradients: as many samples as it has told everybody of, at most."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time

#: Times the samples that a peer was about to have by its last report, for one that has become quicker since, or has
#: gone on until it heard that the epoch is over.
MARGIN = 2.0

#: Times the samples of an epoch, or those that a peer has reported, which no honest peer claims. Below that it may have
#: gone on for long since its last report, as all do in their first epoch, when nobody knows of the others yet.
IMPLAUSIBLE = 10.0


@dataclass(frozen=True)
class Told:
    """What a peer has reported of itself.

    :param epoch: that it works on
    :param samples: that it has gathered for it
    :param samples_per_second: its speed
    :param time: of the report, as the DHT counts seconds
    """

    epoch: int
    samples: float
    samples_per_second: float
    time: float

    def by(self, now: float) -> float:
        """Samples that it should have by a time, infinitely many if it has reported what is no number."""
        samples = self.samples + self.samples_per_second * max(0.0, now - self.time)
        return math.inf if math.isnan(samples) else samples


@dataclass(frozen=True)
class SampleReports:
    """What the peers of a run have reported, on its way to the process that averages.

    :param target_batch_size: samples after which an epoch is over
    :param told: by the peer's id
    """

    target_batch_size: float
    told: Mapping[bytes, Told]

    @classmethod
    def of(cls, target_batch_size: float, reports: Iterable[LocalTrainingProgress]) -> SampleReports:
        """Those reports, of which the DHT has checked the types."""
        told = {
            report.peer_id: Told(report.epoch, report.samples_accumulated, report.samples_per_second, report.time)
            for report in reports
        }
        return cls(target_batch_size, told)


class SenderWeights:
    """The largest weight of each sender of gradients. In the averager's process."""

    def __init__(self) -> None:
        self._target = math.inf
        #: of each peer, its newest reports from two epochs: the last may be of the epoch that has just begun
        self._told: dict[bytes, tuple[Told, ...]] = {}

    def note(self, reports: SampleReports) -> None:
        """Know what was reported last."""
        self._target = reports.target_batch_size
        self._told = {
            peer: (new, *[old for old in self._told.get(peer, ()) if old.epoch != new.epoch][:1])
            for peer, new in reports.told.items()
        }

    def largest(self, senders: Sequence[PeerID], own_id: PeerID) -> list[float]:
        """How much each of them may count for at most.

        For what it has reported, up to twice the samples of an epoch: peers of short epochs go on until they hear that
        one is over. For twice what it should have by now, as far as all together then have the samples of an epoch:
        reports that are late are late for all. And for twice what it would have where all are alike, as a peer does of
        whom nothing was read yet.

        :param own_id: of this peer, which knows its samples
        """
        now, target = get_dht_time(), self._target
        if math.isinf(target):
            return [math.inf] * len(senders)
        alike = target / max(1, len(senders))
        told = [self._told.get(sender.to_bytes(), (Told(0, alike, 0.0, now),)) for sender in senders]
        reported = [max(one.by(one.time) for one in each) for each in told]
        expected = [min(target, max(0.0, *(one.by(now) for one in each))) for each in told]
        scale = min(1.0, target / max(sum(expected), alike))
        return [
            math.inf if sender == own_id else min(MARGIN * target, max(before, MARGIN * max(alike, scale * by_now)))
            for sender, before, by_now in zip(senders, reported, expected, strict=True)
        ]

    def implausible(self, claimed: Mapping[PeerID, float]) -> frozenset[PeerID]:
        """Those who claim more than an honest peer can have, whatever it has reported or not yet.

        :param claimed: their weights in a round
        """
        return frozenset(
            peer
            for peer, weight in claimed.items()
            if weight > IMPLAUSIBLE * max(self._target, *(one.by(one.time) for one in self._told_of(peer)), 0.0)
        )

    def _told_of(self, peer: PeerID) -> tuple[Told, ...]:
        return self._told.get(peer.to_bytes(), ())

    def overstating(self, claimed: Mapping[PeerID, float], epoch: int) -> frozenset[PeerID]:
        """Those who have reported samples of an epoch of which they do not put half into its round.

        An epoch ends when all together have reported enough: whoever reports more than it has makes it too short.

        :param claimed: their weights in that round
        :param epoch: of the round; of another one, a peer may well have had more
        """
        return frozenset(
            peer
            for peer, weight in claimed.items()
            for told in self._told_of(peer)
            if told.epoch == epoch and told.by(told.time) > MARGIN * weight + 1.0
        )
