"""In the DHT's process: finds those again whom this node has known, after a network was cut.

A node strikes off whom it knows at the first request that is not answered (``hivemind/dht/protocol.py``,
``update_routing_table``), and dials nobody after its start. Two between whom the line was cut for half a minute would
never hear of each other again, each the whole of its own swarm.

How often a peer is dialled is the daemon's to say: after each dial in vain it refuses others for longer, by
``5 + n**2`` seconds after the n-th, up to five minutes (go-libp2p, ``p2p/net/swarm/swarm_dial.go``), and answers at
once while it does. Pauses of our own on top of its own would only miss the moment.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass

from hivemind.dht import DHTNode
from hivemind.p2p import P2PDaemonError, P2PHandlerError, PeerID
from hivemind.utils import get_logger
from hivemind.utils.multiaddr import Multiaddr

logger = get_logger(__name__)

#: Seconds between two looks at who was struck off.
LOOK_EVERY = 2.0

#: Seconds that an attempt may take.
REACHED_WITHIN = 10.0

#: Seconds for which a peer is looked for that was met by itself. Whom this one has joined is looked for always.
REMEMBERED_FOR = 3600.0

#: What is raised where a daemon, or a peer that it is to reach, does not answer.
_NO_ANSWER = (P2PDaemonError, P2PHandlerError, OSError, EOFError, TimeoutError, asyncio.TimeoutError)

#: Peers that are remembered, those who were seen last, and attempts at a time.
MOST_REMEMBERED, AT_A_TIME = 64, 8


@dataclass
class Acquaintance:
    """A peer that this node has known.

    :param addresses: at which it listened
    :param seen_at: when it was last in the routing table
    :param is_joined: whether its address was given to this peer at its start
    :param tried_at: when it was last looked for since then
    """

    addresses: tuple[Multiaddr, ...]
    seen_at: float
    is_joined: bool = False
    tried_at: float = 0.0


class Acquaintances:
    """All whom this node has known, those first who were seen longest ago.

    :param initial_peers: multiaddresses, with ids, of those whom it has joined
    """

    def __init__(self, initial_peers: Iterable[str] = ()):
        self._of: dict[PeerID, Acquaintance] = {}
        for peer, addresses in _by_peer(initial_peers).items():
            self._of[peer] = Acquaintance(addresses, seen_at=time.monotonic(), is_joined=True)

    def __len__(self) -> int:
        return len(self._of)

    def see(self, peer: PeerID, addresses: Iterable[Multiaddr]) -> None:
        """A peer is known at present."""
        before = self._of.pop(peer, None)
        known = tuple(addresses) or (() if before is None else before.addresses)
        self._of[peer] = Acquaintance(known, time.monotonic(), before is not None and before.is_joined)
        if len(self._of) > MOST_REMEMBERED:
            longest_ago = next((one for one, other in self._of.items() if not other.is_joined), next(iter(self._of)))
            del self._of[longest_ago]

    def lost(self, present: Iterable[PeerID]) -> list[tuple[PeerID, Acquaintance]]:
        """Those to be looked for now, who have not been for longest; they count as tried.

        :param present: who is known at present
        """
        now = time.monotonic()
        forgotten = [peer for peer, one in self._of.items() if not one.is_joined and now - one.seen_at > REMEMBERED_FOR]
        for peer in forgotten:
            del self._of[peer]
        here = set(present)
        lost = [(peer, one) for peer, one in self._of.items() if peer not in here]
        due = sorted(lost, key=lambda pair: pair[1].tried_at)[:AT_A_TIME]
        for _, one in due:
            one.tried_at = now
        return due


async def find_lost_peers(node: DHTNode, initial_peers: Iterable[str]) -> None:
    """Look for those whom the node has struck off, for as long as the DHT runs.

    :param initial_peers: multiaddresses, with ids, of those whom it has joined
    """
    acquaintances = Acquaintances(initial_peers)
    while True:
        await asyncio.sleep(LOOK_EVERY)
        try:
            await _look(node, acquaintances)
        except _NO_ANSWER as e:  # a daemon that ends is noticed elsewhere
            logger.debug(f"Nobody could be looked for: {e!r}")
        except Exception:
            logger.exception("Peers that were struck off are not looked for any more")
            return


async def _look(node: DHTNode, acquaintances: Acquaintances) -> None:
    present = set(node.protocol.routing_table.peer_id_to_uid)
    for connected in await node.p2p.listening_peers():
        if connected.peer_id in present:
            acquaintances.see(connected.peer_id, connected.addrs)
    lost = acquaintances.lost({*present, node.peer_id})
    blocked = getattr(node.p2p, "blocked", ())
    await asyncio.gather(*(_reach(node, peer, one.addresses) for peer, one in lost if peer not in blocked))


async def _reach(node: DHTNode, peer: PeerID, addresses: Iterable[Multiaddr]) -> None:
    """Know a peer again, and be known to it, if it answers."""
    try:
        await asyncio.wait_for(node.p2p._client.connect(peer, addresses), REACHED_WITHIN)
        await asyncio.wait_for(node.protocol.call_ping(peer), REACHED_WITHIN)
    except _NO_ANSWER as e:
        logger.debug(f"{peer} cannot be reached: {e!r}")


def _by_peer(addresses: Iterable[str]) -> dict[PeerID, tuple[Multiaddr, ...]]:
    found: dict[PeerID, tuple[Multiaddr, ...]] = {}
    for address in addresses:
        way, _, peer_id = address.rpartition("/p2p/")
        if way:
            peer = PeerID.from_base58(peer_id)
            found[peer] = (*found.get(peer, ()), Multiaddr(way))
    return found
