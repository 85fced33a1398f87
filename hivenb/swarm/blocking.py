"""Peers that a person does not want to hear of any more: blocked in this process, and nowhere else."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

from hivemind.p2p import PeerID

from hivenb.engine.dht.blocked_peers import greet
from hivenb.engine.dht.record_rules import is_peer_id
from hivenb.errors import SwarmError

if TYPE_CHECKING:
    from hivenb.engine.dht.dht import DHT


class BlocksPeers:
    """Base of a swarm."""

    peer_id: str
    _lock: threading.RLock
    _dht: DHT | None

    if TYPE_CHECKING:

        @property
        def dht(self) -> DHT:
            """The running DHT."""

    @property
    def blocked(self) -> tuple[str, ...]:
        """Ids of the peers that this one has blocked; none after the swarm is closed."""
        dht = self._dht
        return () if dht is None else tuple(sorted(PeerID(peer).to_base58() for peer in dht.blocked_peers.all))

    def block(self, peer_id: str) -> None:
        """Answer nothing to a peer any more, ask it for nothing, and wait for it in no round.

        For this peer alone: the others, those on this machine too, go on as before. It holds until :meth:`unblock`, or
        the swarm is closed.

        :param peer_id: as ``swarm.peers()`` tells it
        :raises SwarmError: if that is no peer's id, or this one's own; if too many are blocked; if the swarm is closed
        """
        self._change_blocked(peer_id, is_blocked=True)

    def unblock(self, peer_id: str) -> None:
        """Talk to a peer again; without effect if it is not blocked.

        :param peer_id: as :attr:`blocked` tells it
        :raises SwarmError: if that is no peer's id; if the swarm is closed
        """
        self._change_blocked(peer_id, is_blocked=False)
        self.dht.run_coroutine(partial(greet, PeerID.from_base58(peer_id)), return_future=True)

    def _change_blocked(self, peer_id: str, is_blocked: bool) -> None:
        if peer_id == self.peer_id:
            raise SwarmError("this peer cannot block itself")
        peer = read_peer_id(peer_id)
        table = self.dht.blocked_peers
        with self._lock:
            try:
                table.replace(table.all | {peer} if is_blocked else table.all - {peer})
            except ValueError as e:
                raise SwarmError(f"{e}; see swarm.blocked, and swarm.unblock(peer_id)") from e


def read_peer_id(peer_id: str) -> bytes:
    """The id of a peer out of its text.

    :raises SwarmError: if it is none
    """
    try:
        peer = PeerID.from_base58(peer_id).to_bytes()
        is_one = is_peer_id(peer) and PeerID(peer).to_base58() == peer_id
    except Exception:  # hivemind raises errors of several libraries
        is_one = False
    if not is_one:
        raise SwarmError(f"{str(peer_id)[:60]!r} is no peer's id; swarm.peers() tells those of a run")
    return peer
