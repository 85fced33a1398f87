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

from hivenb.engine.dht.guard import EXPIRED, REFUSALS, SHOWN_OUT, STRANGER, Guard
from hivenb.engine.dht.passes import PASS_BYTES
from hivenb.engine.dht.standing import Standing
from hivenb.engine.dht.stream_limits import UnprovenStreams

logger = get_logger(__name__)

#: Seconds for which a stream is kept open to whoever has opened it and proves nothing.
PROVEN_WITHIN = 10.0

#: What a peer without a guard, which takes a pass for a part of the request, most likely says of it.
UNREADABLE = "DecodeError("


class Refused(Exception):
    """One has called who is not let in. What hivemind sends of it is its ``repr``."""


class WatchfulClient(Client):
    """hivemind's connection to the daemon, which notices when other peers let this one not in.

    :param client: to take the place of
    """

    def __init__(self, client: Client):
        super().__init__(_initialized_with_create=True)
        self.control, client.control = client.control, None  # which it would close with itself
        #: why another peer has refused to answer, the last time that one did; empty if none has
        self.refusal = ""
        #: whether another peer has answered without a pass for the swarm of this one
        self.met_stranger = False
        #: where it is noted whether others let this peer in, if it is
        self.standing: Standing | None = None

    async def call_unary_handler(self, peer_id: PeerID, proto: str, data: bytes) -> bytes:
        try:
            return bytes(await super().call_unary_handler(peer_id, proto, data))
        except P2PHandlerError as e:
            self._note(next((reason for reason in REFUSALS if reason in str(e)), ""))
            raise

    def _note(self, reason: str) -> None:
        if reason in (SHOWN_OUT, EXPIRED) and reason != self.refusal:
            logger.warning(f"Another peer does not talk to this one any more: {reason}. Ask for a new invite")
        self.refusal = reason or self.refusal
        if self.standing is not None:
            self.standing.note_refusal(reason)


class GuardedClient(WatchfulClient):
    """One that talks only to those who have a pass for its swarm, for as long as that is good.

    :param client: to take the place of
    :param guard: has a pass, and looks at those of others
    """

    def __init__(self, client: Client, guard: Guard):
        super().__init__(client)
        self.guard = guard
        self._unproven = UnprovenStreams()

    async def call_unary_handler(self, peer_id: PeerID, proto: str, data: bytes) -> bytes:
        self._require(peer_id)
        try:
            answer = await super().call_unary_handler(peer_id, proto, self.guard.own_pass + data)
        except P2PHandlerError as e:
            self.met_stranger |= UNREADABLE in str(e)
            raise
        if reason := self.guard.why_not(answer[:PASS_BYTES], peer_id):
            self.met_stranger |= reason == STRANGER
            raise _not_admitted(peer_id, reason)
        if self.standing is not None:
            self.standing.note_answer()
        return answer[PASS_BYTES:]

    async def add_unary_handler(self, proto: str, handler: Any, balanced: bool = False) -> None:
        async def guarded(request: bytes, caller: PeerID) -> bytes:
            if reason := self.guard.why_not(request[:PASS_BYTES], caller):
                logger.debug(f"{caller} called {proto} and is not let in: {reason}")
                raise Refused(reason)
            response: bytes = await handler(request[PASS_BYTES:], caller)
            return self.guard.own_pass + response

        await super().add_unary_handler(proto, guarded, balanced)

    async def stream_open(
        self, peer_id: PeerID, protocols: Sequence[str]
    ) -> tuple[StreamInfo, Any, asyncio.StreamWriter]:
        self._require(peer_id)
        info, reader, writer = await super().stream_open(peer_id, protocols)
        writer.write(self.guard.own_pass)
        watched: Any = _WatchedWriter(writer, self.guard, peer_id)
        return info, _WatchedReader(reader, self.guard, peer_id, is_proven=False), watched

    async def stream_handler(self, proto: str, handler_cb: Any, balanced: bool = False) -> None:
        async def guarded(info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            shown, peer = b"", info.peer_id
            too_late = (asyncio.IncompleteReadError, OSError, TimeoutError, asyncio.TimeoutError)
            with self._unproven.waiting(peer, writer), contextlib.suppress(*too_late):
                shown = await asyncio.wait_for(reader.readexactly(PASS_BYTES), PROVEN_WITHIN)
            if reason := self.guard.why_not(shown, peer):
                logger.debug(f"{peer} opened {proto} and is not let in: {reason}")
                writer.close()
                return
            writer.write(self.guard.own_pass)
            guard = self.guard
            await handler_cb(info, _WatchedReader(reader, guard, peer), _WatchedWriter(writer, guard, peer))

        await super().stream_handler(proto, guarded, balanced)

    def _require(self, callee: PeerID) -> None:
        """Send nothing to one of whom it is known that it is out."""
        if reason := self.guard.why_no_more(callee):
            raise _not_admitted(callee, reason)


def _not_admitted(peer: PeerID, reason: str) -> P2PHandlerError:
    if reason == STRANGER:
        return P2PHandlerError(f"{peer} has no pass for this swarm")
    return P2PHandlerError(f"nothing is asked of {peer}: it was shown the door, or its invite has expired")


class _WatchedReader:
    """What comes through a stream, none of which is read before its sender has shown a pass, or when it is out.

    Not when the stream is opened: the pass of who is called comes with the answer, and costs no time of its own.
    """

    def __init__(self, reader: asyncio.StreamReader, guard: Guard, peer: PeerID, is_proven: bool = True):
        self._reader, self._guard, self._peer = reader, guard, peer
        self._is_proven = is_proven

    async def readexactly(self, count: int) -> bytes:
        if not self._is_proven:
            shown = await self._reader.readexactly(PASS_BYTES)
            if reason := self._guard.why_not(shown, self._peer):
                raise _not_admitted(self._peer, reason)
            self._is_proven = True
        data = await self._reader.readexactly(count)
        if reason := self._guard.why_no_more(self._peer):
            raise _not_admitted(self._peer, reason)
        return data


class _WatchedWriter:
    """What goes through a stream: nothing more when the other end is out."""

    def __init__(self, writer: asyncio.StreamWriter, guard: Guard, peer: PeerID):
        self._writer, self._guard, self._peer = writer, guard, peer

    def write(self, data: Any) -> None:
        if reason := self._guard.why_no_more(self._peer):
            self._writer.close()
            raise _not_admitted(self._peer, reason)
        self._writer.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)
