"""Where connected peers listen, which their connections do not show: they dial from other ports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerInfo
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure, raise_if_failed, read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

from hivenb.engine.dht.addresses import is_loopback

#: Nanoseconds that the daemon is given. It knows of all who are connected; one that has just gone it would look for.
_ANSWERS_WITHIN = 10**9


class KnowsWhereTheyListen(P2P):
    """Mixin to put *before* ``hivemind``'s ``P2P``."""

    #: the addresses of connections that were looked up, and what was found, by peers
    _looked_up: dict[PeerID, tuple[tuple[Multiaddr, ...], tuple[Multiaddr, ...]]] | None = None

    async def listening_peers(self, connected: Sequence[PeerInfo] | None = None) -> list[PeerInfo]:
        """Who is connected, and where each can be dialled; at the address of its connection if nothing else is known.

        libp2p asks each new peer where it listens (https://github.com/libp2p/specs/blob/master/identify/README.md).

        :param connected: as :meth:`list_peers` has just told; by default it is asked
        """
        before, now = self._looked_up or {}, {}
        found = []
        for one in await self.list_peers() if connected is None else connected:
            own = tuple(one.addrs)
            known, listens = before.get(one.peer_id, ((), ()))
            if known != own:
                listens = await self._look_up(one.peer_id, own)
            if listens:
                now[one.peer_id] = own, listens
            found.append(PeerInfo(one.peer_id, listens or own))
        self._looked_up = now
        return found

    async def _look_up(self, peer: PeerID, connections: tuple[Multiaddr, ...]) -> tuple[Multiaddr, ...]:
        kind = p2pd_pb2.DHTRequest.FIND_PEER
        wanted = p2pd_pb2.DHTRequest(type=kind, peer=peer.to_bytes(), timeout=_ANSWERS_WITHIN)
        answer: Any = p2pd_pb2.Response()
        reader, writer = await self._client.control.daemon_connector.open_connection()
        try:
            await write_pbmsg(writer, p2pd_pb2.Request(type=p2pd_pb2.Request.DHT, dht=wanted))
            await read_pbmsg_safe(reader, answer)
            raise_if_failed(answer)
        except ControlFailure:
            return ()
        finally:
            writer.close()
        found = [Multiaddr(address) for address in answer.dht.peer.addrs]
        is_here = all(is_loopback(str(address)) for address in connections)
        return tuple(address for address in found if is_here or not is_loopback(str(address)))
