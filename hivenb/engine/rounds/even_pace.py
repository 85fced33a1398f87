"""Sends the parts of a model to the others of a group evenly, so that nobody is through long before the last one.

Each average waits for all senders of its part. TCP shares a line out unevenly among connections: left to it, one of the
others has all its parts when another one has half of them, and in the end the lines of most are idle.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable, Mapping

#: Parts by which a receiver may be ahead of the one that is furthest behind.
LEAD = 2

#: Seconds for which a part waits for others, at most: one who stands still is to keep nobody from being sent anything.
PATIENCE = 0.5


class EvenPace:
    """How far a sender is with each of its receivers.

    :param counts: parts that each of them gets in all
    """

    def __init__(self, counts: Mapping[Hashable, int]):
        self._counts = {receiver: count for receiver, count in counts.items() if count > 0}
        self._sent = dict.fromkeys(self._counts, 0)
        self._moved = asyncio.Event()

    async def turn_of(self, receiver: Hashable) -> None:
        """Wait until the next part may be sent to a receiver, which counts as sent from then on."""
        if receiver not in self._sent:
            return
        end = time.monotonic() + PATIENCE
        while self.lead_of(receiver) >= LEAD and (seconds := end - time.monotonic()) > 0:
            waiting = asyncio.ensure_future(self._moved.wait())
            await asyncio.wait({waiting}, timeout=seconds)
            waiting.cancel()
        if receiver in self._sent:
            self._sent[receiver] += 1
        self._tell()

    def lead_of(self, receiver: Hashable) -> float:
        """Parts by which a receiver is ahead of the one that is furthest behind, by the shares of what each gets."""
        if receiver not in self._sent:
            return 0.0
        least = min(sent / self._counts[one] for one, sent in self._sent.items())
        return self._sent[receiver] - least * self._counts[receiver]

    def leave(self, receiver: Hashable) -> None:
        """Wait for a receiver no longer, which has got all or has gone."""
        if self._sent.pop(receiver, None) is not None:
            self._tell()

    def _tell(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()
