"""All bytes between peers of a private swarm go through here; a stranger's are dropped before anything reads them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.control import P2PHandlerError
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.p2p.p2p_daemon_bindings.p2pclient import Client
from hivemind.utils import get_logger

from hivenb.engine.dht.guard import PROOF_BYTES, Guard

logger = get_logger(__name__)

#: Seconds for which a stream is kept open to whoever has opened it and proves nothing.
PROVEN_WITHIN = 10.0

#: All that a stranger gets, and plain hivemind logs.
REFUSAL = "this swarm is private: only peers of hivenb can join it, with its invite"

#: What a peer without a guard, which takes a proof for a part of the request, most likely says of it.
UNREADABLE = "DecodeError("


class Refused(Exception):
    """A stranger has called. What hivemind sends of it is its ``repr``."""

    def __init__(self) -> None:
        super().__init__(REFUSAL)


class WatchfulClient(Client):
    """hivemind's connection to the daemon, which notices when other peers let this one not in.

    :param client: to take the place of
    """

    def __init__(self, client: Client):
        super().__init__(_initialized_with_create=True)
        self.control, client.control = client.control, None  # which it would close with itself
        #: whether another peer has refused to answer, since this one does not know its secret
        self.was_refused = False
        #: whether another peer has answered without a proof that it knows the secret of this one
        self.met_stranger = False

    async def call_unary_handler(self, peer_id: PeerID, proto: str, data: bytes) -> bytes:
        try:
            return bytes(await super().call_unary_handler(peer_id, proto, data))
        except P2PHandlerError as e:
            self.was_refused |= REFUSAL in str(e)
            raise


class GuardedClient(WatchfulClient):
    """One that talks only to those who know the secret of its swarm.

    :param client: to take the place of
    :param guard: knows the secret
    """

    def __init__(self, client: Client, guard: Guard):
        super().__init__(client)
        self._guard = guard

    async def call_unary_handler(self, peer_id: PeerID, proto: str, data: bytes) -> bytes:
        try:
            answer = await super().call_unary_handler(peer_id, proto, self._guard.of_call(peer_id) + data)
        except P2PHandlerError as e:
            self.met_stranger |= UNREADABLE in str(e)
            raise
        if not self._guard.admits_answer(answer[:PROOF_BYTES], peer_id):
            self.met_stranger = True
            raise P2PHandlerError(f"{peer_id} does not know the secret of this swarm")
        return answer[PROOF_BYTES:]

    async def add_unary_handler(self, proto: str, handler: Any, balanced: bool = False) -> None:
        async def guarded(request: bytes, caller: PeerID) -> bytes:
            if not self._guard.admits_call(request[:PROOF_BYTES], caller):
                logger.debug(f"{caller} called {proto} and does not know the secret of this swarm")
                raise Refused
            response: bytes = await handler(request[PROOF_BYTES:], caller)
            return self._guard.of_answer(caller) + response

        await super().add_unary_handler(proto, guarded, balanced)

    async def stream_open(
        self, peer_id: PeerID, protocols: Sequence[str]
    ) -> tuple[StreamInfo, Any, asyncio.StreamWriter]:
        info, reader, writer = await super().stream_open(peer_id, protocols)
        writer.write(self._guard.of_call(peer_id))
        return info, _ProvenReader(reader, self._guard, peer_id), writer

    async def stream_handler(self, proto: str, handler_cb: Any, balanced: bool = False) -> None:
        async def guarded(info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            proof = b""
            with contextlib.suppress(asyncio.IncompleteReadError, OSError, TimeoutError, asyncio.TimeoutError):
                proof = await asyncio.wait_for(reader.readexactly(PROOF_BYTES), PROVEN_WITHIN)
            if not self._guard.admits_call(proof, info.peer_id):
                logger.debug(f"{info.peer_id} opened {proto} and does not know the secret of this swarm")
                writer.close()
                return
            writer.write(self._guard.of_answer(info.peer_id))
            await handler_cb(info, reader, writer)

        await super().stream_handler(proto, guarded, balanced)


class _ProvenReader:
    """What comes back through a stream, none of which is read before its sender has proven itself.

    Not when the stream is opened: the proof comes with the answer, and costs no time of its own.
    """

    def __init__(self, reader: asyncio.StreamReader, guard: Guard, callee: PeerID):
        self._reader, self._guard, self._callee = reader, guard, callee
        self._is_proven = False

    async def readexactly(self, count: int) -> bytes:
        if not self._is_proven:
            proof = await self._reader.readexactly(PROOF_BYTES)
            if not self._guard.admits_answer(proof, self._callee):
                raise P2PHandlerError(f"{self._callee} does not know the secret of this swarm")
            self._is_proven = True
        return await self._reader.readexactly(count)
