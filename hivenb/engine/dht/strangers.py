"""In the DHT's process: hangs up on those who are connected to a private relay, and are no members of its swarm.

libp2p's daemon asks nobody for a pass before it relays, and has no list of whom to relay for. But a place at a relay
is had through a connection to it, and is gone with that.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from hivemind.dht import DHTNode
from hivemind.p2p import P2PDaemonError, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.utils import get_logger

from hivenb.engine.dht.guard import Guard

logger = get_logger(__name__)

#: Seconds from one look at who is connected to the next, and that a peer is given to show its pass.
LOOK_EVERY, ANSWERS_WITHIN = 5.0, 5.0

#: Looks after which one is hung up on that has shown none: a newcomer may be busy.
PATIENCE = 2


async def disconnect_strangers(node: DHTNode) -> None:
    """Look again and again who is connected, and hang up on strangers, for as long as the DHT runs.

    :param node: of a private swarm
    """
    guard: Guard = node.p2p.guard
    silent: dict[bytes, int] = {}
    while True:
        await asyncio.sleep(LOOK_EVERY)
        with suppress(
            ControlFailure, P2PDaemonError, OSError, EOFError
        ):  # the daemon is ending; that is seen elsewhere
            connected = {peer.peer_id for peer in await node.p2p.list_peers()}
            strangers = await _strangers_among(connected, guard, node)
            silent = {peer.to_bytes(): silent.get(peer.to_bytes(), 0) + 1 for peer in strangers}
            for peer in strangers:
                if silent[peer.to_bytes()] >= PATIENCE:
                    logger.debug(f"{peer} is connected, and is no member: hung up on")
                    await node.p2p._client.disconnect(peer)


async def _strangers_among(connected: set[PeerID], guard: Guard, node: DHTNode) -> list[PeerID]:
    unseen = [peer for peer in connected if peer.to_bytes() not in guard.seen]
    pings = (asyncio.wait_for(node.protocol.call_ping(peer), ANSWERS_WITHIN) for peer in unseen)
    await asyncio.gather(*pings, return_exceptions=True)
    return [peer for peer in connected if peer.to_bytes() not in guard.seen or guard.why_no_more(peer) is not None]
