"""How often a peer looks for others to average with, in the DHT."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

from hivemind.averaging.key_manager import GroupKeyManager
from hivemind.p2p import PeerID

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
