"""In the DHT's process: hangs up on those who are connected to a private swarm, and are no members of it.

libp2p's daemon asks nobody for a credential before it relays, has no list of whom to relay for, and cannot be told
not to. But what is relayed ends with the connection to whom it is relayed for.
"""

from __future__ import annotations

import asyncio
import time

from hivemind.dht import DHTNode
from hivemind.p2p import PeerID
from hivemind.utils import get_logger

from hivenb.engine.network.access.guard import Guard
from hivenb.engine.network.reachability import ask

logger = get_logger(__name__)

#: Seconds from one look at who is connected to the next.
LOOK_EVERY = 2.0

#: Looks after which one is hung up on that has shown no credential: a newcomer's own DHT may only just be starting.
LOOKS_ALLOWED = 3

#: Seconds for which it is remembered, so that one who comes back at once is hung up on at once; and how many are.
_REMEMBERED_FOR, _MOST_REMEMBERED = 3600.0, 4096


async def disconnect_strangers(node: DHTNode) -> None:
    """Look again and again who is connected, and hang up on strangers, for as long as the DHT runs.

    :param node: of a private swarm
    """
    strikes = Strikes()
    while True:
        await asyncio.sleep(LOOK_EVERY)
        try:
            await _look(node, strikes)
        except Exception as e:  # of several libraries; a daemon that ends is noticed elsewhere
            logger.debug(f"It could not be seen who is connected: {e!r}")


class Strikes:
    """How often each has shown no credential that was to; kept for an hour, of the last who did not."""

    def __init__(self) -> None:
        self._of: dict[bytes, tuple[int, float]] = {}

    def add(self, peer: PeerID) -> int:
        """Note one more, and tell how many there are."""
        now = time.monotonic()
        before, at = self._of.pop(peer.to_bytes(), (0, now))
        count = before + 1 if now - at < _REMEMBERED_FOR else 1
        self._of[peer.to_bytes()] = count, now  # the last one of them all
        if len(self._of) > _MOST_REMEMBERED:
            del self._of[next(iter(self._of))]
        return count

    def forget(self, peer: PeerID) -> None:
        """It has shown one."""
        self._of.pop(peer.to_bytes(), None)


async def _look(node: DHTNode, strikes: Strikes) -> None:
    guard: Guard = node.p2p.guard
    connected = {peer.peer_id for peer in await node.p2p.list_peers()}
    # with the answer comes its credential, if it has one
    await asyncio.gather(*(ask(node.p2p, peer) for peer in connected if peer.to_bytes() not in guard.seen))
    for peer in connected:
        if peer.to_bytes() in guard.seen and guard.why_no_more(peer) is None:
            strikes.forget(peer)
        elif strikes.add(peer) >= LOOKS_ALLOWED:
            logger.debug(f"{peer} is connected, and is no member: hung up on")
            await node.p2p._client.disconnect(peer)
