"""Whom a peer of a private swarm talks to: those who show a good pass, and were not shown the door.

Each request and each stream begins with the caller's pass (:mod:`hivenb.engine.dht.passes`), and what comes back with
that of the callee.
"""

from __future__ import annotations

import time

from hivemind.p2p import PeerID

from hivenb.engine.dht.door import Door
from hivenb.engine.dht.passes import Membership, Pass, read_pass

#: Passes of others that a peer keeps, so that each is verified once.
_KEPT_PASSES = 4096

#: All that those get who are not let in, and plain hivemind logs.
STRANGER = "this swarm is private: only peers of hivenb can join it, with its invite"
EXPIRED = "the invite that this peer came by has expired"
SHOWN_OUT = "this peer was shown the door of the swarm, or the one who passed its invite on was"

#: Why a peer is not let in, the most telling first.
REFUSALS = (SHOWN_OUT, EXPIRED, STRANGER)


class Guard:
    """Shows a peer's pass, and looks at those of others.

    :param membership: of this peer
    :param own_id: its id
    :param door: who is out; by default nobody is
    """

    def __init__(self, membership: Membership, own_id: PeerID, door: Door | None = None):
        self._authority = membership.key.authority
        self._door = Door(self._authority) if door is None else door
        #: what this peer puts before what it sends
        self.own_pass = membership.key.pass_of(own_id.to_bytes())
        #: good passes by the ids of their peers, expired ones among them
        self.seen: dict[bytes, Pass] = {}
        self._verified: dict[tuple[bytes, bytes], Pass] = {}

    def why_not(self, shown: bytes, peer: PeerID) -> str | None:
        """Why a peer is not let in, in words; ``None`` if it is.

        :param shown: what it has sent for a pass, any bytes
        :param peer: its id, as libp2p has authenticated it
        """
        peer_id = peer.to_bytes()
        known = self._verified.get((peer_id, shown)) or self._verify(peer_id, shown)
        return STRANGER if known is None else self._why_out(peer_id, known)

    def why_no_more(self, peer: PeerID) -> str | None:
        """Why a peer, which may have been let in before, is not talked to any more; ``None`` if nothing is known."""
        peer_id = peer.to_bytes()
        return self._why_out(peer_id, self.seen.get(peer_id))

    def _verify(self, peer_id: bytes, shown: bytes) -> Pass | None:
        known = read_pass(shown, peer_id, self._authority)
        if known is not None:  # what strangers show takes no room from members
            if len(self._verified) >= _KEPT_PASSES:
                self._verified.clear()
                self.seen.clear()
            self._verified[peer_id, shown] = self.seen[peer_id] = known
        return known

    def _why_out(self, peer_id: bytes, known: Pass | None) -> str | None:
        if self._door.list.has_put_out(peer_id, known):
            return SHOWN_OUT
        return EXPIRED if known is not None and known.expires <= time.time() else None
