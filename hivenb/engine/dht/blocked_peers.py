"""Peers that a person has blocked: nothing of theirs is answered, and nothing is asked of them."""

from __future__ import annotations

import asyncio
import ctypes
from multiprocessing.sharedctypes import RawArray
from typing import Any

import hivemind
from hivemind.dht import DHTNode
from hivemind.p2p import P2P, P2PHandlerError, PeerID

#: How many a person can block.
MOST_BLOCKED = 256

#: Bytes for an id; those of libp2p have up to 42.
_SLOT = 64


class BlockedPeers:
    """Ids of blocked peers, which all processes see that are forked later. One process writes."""

    def __init__(self) -> None:
        self._slots = RawArray(ctypes.c_char, MOST_BLOCKED * _SLOT)

    @property
    def all(self) -> frozenset[bytes]:
        """Their ids."""
        raw = self._slots.raw
        slots = (raw[start : start + _SLOT] for start in range(0, len(raw), _SLOT))
        return frozenset(slot[1 : 1 + slot[0]] for slot in slots if slot[0])

    def __contains__(self, peer: PeerID) -> bool:
        return bool(self._slots.raw[0]) and peer.to_bytes() in self.all

    def replace(self, peers: frozenset[bytes]) -> None:
        """Block these, and no others.

        :raises ValueError: if they are too many
        """
        if len(peers) > MOST_BLOCKED:
            raise ValueError(f"no more than {MOST_BLOCKED} peers can be blocked")
        written = b"".join(bytes([len(peer)]) + peer.ljust(_SLOT - 1, b"\0") for peer in sorted(peers))
        self._slots.raw = written.ljust(MOST_BLOCKED * _SLOT, b"\0")


async def greet(peer: PeerID, dht: hivemind.DHT, node: DHTNode) -> None:
    """In the DHT's process: know a peer again that was blocked, and be known to it; each has struck the other off."""
    await node.protocol.call_ping(peer)


class RefusesBlocked(P2P):
    """Mixin to put *before* ``hivemind``'s ``P2P``, which has no say in who may talk to it."""

    #: whom it refuses; nobody by default
    blocked: BlockedPeers | frozenset[PeerID] = frozenset()

    def _refuse(self, peer: PeerID) -> None:
        if peer in self.blocked:
            raise P2PHandlerError(f"{peer} is blocked")

    async def add_binary_stream_handler(self, name: str, handler: Any, balanced: bool = False) -> None:
        async def guarded(stream: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if stream.peer_id in self.blocked:
                writer.close()
                return
            await handler(stream, reader, writer)

        await super().add_binary_stream_handler(name, guarded, balanced)

    async def _add_protobuf_unary_handler(
        self, handle_name: str, handler: Any, input_protobuf_type: Any, balanced: bool = False
    ) -> None:
        async def guarded(request: Any, context: Any) -> Any:
            self._refuse(context.remote_id)
            return await handler(request, context)

        await super()._add_protobuf_unary_handler(handle_name, guarded, input_protobuf_type, balanced)

    async def call_binary_stream_handler(self, peer_id: PeerID, handler_name: str) -> Any:
        self._refuse(peer_id)
        return await super().call_binary_stream_handler(peer_id, handler_name)

    async def _call_unary_protobuf_handler(self, peer_id: PeerID, *args: Any, **kwargs: Any) -> Any:
        self._refuse(peer_id)
        return await super()._call_unary_protobuf_handler(peer_id, *args, **kwargs)
