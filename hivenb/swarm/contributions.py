"""What each peer has put into a run so far, from what the peers report of themselves."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median_low
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hivenb.engine.progress.peer_reports import PeerInfo

#: Epochs beyond what the peers' speeds explain that are still credited between two looks; more were not trained but
#: jumped over, as by a peer that has just joined.
SLACK = 2


class Contributions:
    """Adds up samples per peer over the epochs of a run. For one thread.

    A report tells how far its peer is within an epoch, and is seen now and then only. So each epoch that ends counts
    for ``target_batch_size`` samples, as it does in the run, and the peers share them in proportion to what they had
    reported in it when last seen. Reports are not proven: a peer can claim more than it does, but not more than an
    epoch holds.

    :param capacity: most peers to remember by name; of more, the smallest are only counted together
    """

    def __init__(self, capacity: int = 1000):
        self._capacity = capacity
        self._credits: dict[str, float] = {}
        self._forgotten = 0.0
        self._epoch: int | None = None
        self._in_epoch: dict[str, float] = {}

    @property
    def total(self) -> float:
        """Samples of all peers together, those that have left included."""
        return sum(self._credits.values()) + sum(self._in_epoch.values()) + self._forgotten

    @property
    def peer_ids(self) -> frozenset[str]:
        """Peers of which a contribution is known."""
        return frozenset(self._credits) | frozenset(self._in_epoch)

    def samples(self, peer_id: str) -> float:
        """Samples of one peer, those of the epoch that has not ended included."""
        return self._credits.get(peer_id, 0.0) + self._in_epoch.get(peer_id, 0.0)

    def share(self, peer_id: str) -> float:
        """One peer's part of all, from 0 to 1."""
        total = self.total
        return self.samples(peer_id) / total if total > 0 else 0.0

    def note(self, peers: Iterable[PeerInfo], target_batch_size: int, seconds: float) -> None:
        """Take in what the peers report now.

        :param peers: all that are there; this process's own report says which epoch it is, without it the others'
        :param target_batch_size: samples that make an epoch
        :param seconds: since the last look
        """
        reports = tuple(peers)
        if not reports:
            return
        own = next((peer.epoch for peer in reports if peer.is_self), None)
        epoch = median_low(peer.epoch for peer in reports) if own is None else own
        speed = sum(peer.samples_per_second for peer in reports)
        most = SLACK + 2 * speed * seconds / target_batch_size
        if self._epoch is None or not 0 <= epoch - self._epoch <= most:
            self._epoch, self._in_epoch = epoch, {}
        elif epoch > self._epoch:
            self._settle((epoch - self._epoch) * target_batch_size, reports)
            self._epoch, self._in_epoch = epoch, {}
        for peer in reports:
            if peer.epoch == epoch and peer.samples > 0:
                before = self._in_epoch.get(peer.peer_id, 0.0)
                self._in_epoch[peer.peer_id] = max(before, float(min(peer.samples, target_batch_size)))

    def _settle(self, samples: int, reports: tuple[PeerInfo, ...]) -> None:
        weights = self._in_epoch or {p.peer_id: p.samples_per_second for p in reports if p.samples_per_second > 0}
        whole = sum(weights.values())
        for peer_id, weight in weights.items():
            self._credits[peer_id] = self._credits.get(peer_id, 0.0) + samples * weight / whole
        for peer_id in sorted(self._credits, key=self._credits.__getitem__)[: -self._capacity]:
            self._forgotten += self._credits.pop(peer_id)
