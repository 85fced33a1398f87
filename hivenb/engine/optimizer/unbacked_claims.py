"""Peers that claim to be epochs ahead, of which no state is to be had: nobody can follow them, or should try to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hivemind.p2p import PeerID
from hivemind.utils import get_logger

from hivenb.engine.progress.peer_reports import PeerInfo
from hivenb.engine.rounds.conduct import MOST_PAUSES, LeftOut

logger = get_logger(__name__)

#: Epochs by which the newest state to be had may be behind what was reported.
BEHIND = 2

#: Seconds for which a state of a claimed epoch is looked for.
BACKED_WITHIN = 10.0

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


class UnbackedClaims:
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
        if searched < BACKED_WITHIN:
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

    def left_out(self) -> tuple[LeftOut, ...]:
        """Those whose claims count for nothing at present."""
        doubt = self._doubt
        remaining = doubt.until - self._clock()
        if remaining <= 0:
            return ()
        return tuple(
            LeftOut(peer, f"reports epoch {epoch}, of which no peer sends a state", 0, remaining, is_avoided=False)
            for peer, epoch in doubt.epochs.items()
        )
