"""How often another peer may download the state: as often as one that joins has to, and not in a loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import AsyncIterator

from hivemind.p2p import PeerID

#: Seconds for each download, in the long run.
PERIOD = 1.0

#: Downloads that a peer may make at once before that; one that joins may need several until it is at the newest epoch.
AT_ONCE = 8

#: Peers that are remembered.
MOST_REMEMBERED = 1024


class DownloadPace:
    """Lets each peer wait for its turn. It is not refused, as one that joins would then end. On one event loop.

    :param clock: tells the time, in seconds
    :param sleep: waits for so many
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ):
        self._clock, self._sleep = clock, sleep
        self._paid_until: dict[PeerID, float] = {}
        self._at_work: dict[PeerID, asyncio.Lock] = {}

    @contextlib.asynccontextmanager
    async def turn(self, peer: PeerID) -> AsyncIterator[None]:
        """Wait until a peer may download; one of its downloads at a time."""
        lock = self._at_work.setdefault(peer, asyncio.Lock())
        try:
            async with lock:
                await self._sleep(max(0.0, self._pay(peer) - AT_ONCE * PERIOD))
                yield
        finally:
            if not lock.locked():
                self._at_work.pop(peer, None)

    def _pay(self, peer: PeerID) -> float:
        """Seconds by which a peer's downloads are ahead of the time, with this one."""
        now = self._clock()
        if len(self._paid_until) >= MOST_REMEMBERED:
            self._paid_until = {one: until for one, until in self._paid_until.items() if until > now}
        self._paid_until[peer] = max(self._paid_until.get(peer, now), now) + PERIOD
        return self._paid_until[peer] - now
