"""hivemind's connection to the daemon: all bytes between peers of a private swarm go through here.

A stranger's are dropped before anything reads them.
"""

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

from hivenb.engine.network.access.guard import BANNED, EXPIRED, REFUSALS, STRANGER, AdmissionStatus, Guard
from hivenb.engine.network.access.streams import GatheringWriter, StreamHandler, UnprovenStreams
from hivenb.engine.network.access.tokens import CREDENTIAL_BYTES

logger = get_logger(__name__)

#: Seconds for which a stream is kept open to whoever has opened it and proves nothing.
PROVEN_WITHIN = 10.0

#: What a peer without a guard, which takes a credential for a part of the request, most likely says of it.
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
        #: whether another peer has answered without a credential for the swarm of this one
        self.met_stranger = False
        #: where it is noted whether others let this peer in, if it is
        self.admission_status: AdmissionStatus | None = None

    async def stream_open(self, peer_id: PeerID, protocols: Sequence[str]) -> tuple[StreamInfo, Any, Any]:
        self._require(peer_id)
        info, reader, writer = await super().stream_open(peer_id, protocols)
        return info, *self._to_callee(peer_id, reader, GatheringWriter(writer))

    async def stream_handler(self, proto: str, handler_cb: StreamHandler, balanced: bool = False) -> None:
        async def answer(info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            ends = await self._from_caller(info, reader, GatheringWriter(writer))
            if ends is not None:
                await handler_cb(info, *ends)

        await super().stream_handler(proto, answer, balanced)

    async def call_unary_handler(self, peer_id: PeerID, proto: str, data: bytes) -> bytes:
        request = self._request_to(peer_id, data)
        try:
            answer = bytes(await super().call_unary_handler(peer_id, proto, request))
        except P2PHandlerError as e:
            self._note(next((reason for reason in REFUSALS if reason in str(e)), ""))
            self.met_stranger |= self._is_of_stranger(e)
            raise
        return self._answer_of(peer_id, answer)

    def _require(self, callee: PeerID) -> None:
        """Send nothing to one who is not to be talked to: nobody is known to be one."""

    def _to_callee(self, callee: PeerID, reader: Any, writer: Any) -> tuple[Any, Any]:
        """What reads and writes a stream that this peer has opened."""
        return reader, writer

    async def _from_caller(self, info: StreamInfo, reader: Any, writer: Any) -> tuple[Any, Any] | None:
        """What reads and writes a stream that another peer has opened; ``None`` to answer nothing."""
        return reader, writer

    def _request_to(self, peer_id: PeerID, data: bytes) -> bytes:
        """What is sent to ask for something."""
        return data

    def _answer_of(self, peer_id: PeerID, answer: bytes) -> bytes:
        """What has come of it."""
        return answer

    def _is_of_stranger(self, error: P2PHandlerError) -> bool:
        """Whether somebody who is in no private swarm has refused to answer."""
        return False

    def _note(self, reason: str) -> None:
        if reason in (BANNED, EXPIRED) and reason != self.refusal:
            logger.warning(f"Another peer does not talk to this one any more: {reason}. Ask for a new invite")
        self.refusal = reason or self.refusal
        if self.admission_status is not None:
            self.admission_status.note_refusal(reason)


class GuardedClient(WatchfulClient):
    """One that talks only to those who have a credential for its swarm, for as long as that is good.

    :param client: to take the place of
    :param guard: has a credential, and looks at those of others
    """

    def __init__(self, client: Client, guard: Guard):
        super().__init__(client)
        self.guard = guard
        self._unproven = UnprovenStreams()

    def _request_to(self, peer_id: PeerID, data: bytes) -> bytes:
        self._require(peer_id)
        return self.guard.own_credential + data

    def _is_of_stranger(self, error: P2PHandlerError) -> bool:
        return UNREADABLE in str(error)

    def _answer_of(self, peer_id: PeerID, answer: bytes) -> bytes:
        if reason := self.guard.why_not(answer[:CREDENTIAL_BYTES], peer_id):
            self.met_stranger |= reason == STRANGER
            raise _not_admitted(peer_id, reason)
        if self.admission_status is not None:
            self.admission_status.note_answer()
        return answer[CREDENTIAL_BYTES:]

    async def add_unary_handler(self, proto: str, handler: Any, balanced: bool = False) -> None:
        async def guarded(request: bytes, caller: PeerID) -> bytes:
            if reason := self.guard.why_not(request[:CREDENTIAL_BYTES], caller):
                logger.debug(f"{caller} called {proto} and is not let in: {reason}")
                raise Refused(reason)
            response: bytes = await handler(request[CREDENTIAL_BYTES:], caller)
            return self.guard.own_credential + response

        await super().add_unary_handler(proto, guarded, balanced)

    def _require(self, callee: PeerID) -> None:
        if reason := self.guard.why_no_more(callee):
            raise _not_admitted(callee, reason)

    def _to_callee(self, callee: PeerID, reader: Any, writer: Any) -> tuple[Any, Any]:
        writer.write(self.guard.own_credential)
        return (
            _WatchedReader(reader, self.guard, callee, is_proven=False),
            _WatchedWriter(writer, self.guard, callee),
        )

    async def _from_caller(self, info: StreamInfo, reader: Any, writer: Any) -> tuple[Any, Any] | None:
        shown, caller, guard = b"", info.peer_id, self.guard
        too_late = (asyncio.IncompleteReadError, OSError, TimeoutError, asyncio.TimeoutError)
        with self._unproven.waiting(caller, writer), contextlib.suppress(*too_late):
            shown = await asyncio.wait_for(reader.readexactly(CREDENTIAL_BYTES), PROVEN_WITHIN)
        if reason := guard.why_not(shown, caller):
            logger.debug(f"{caller} opened {info.proto} and is not let in: {reason}")
            writer.close()
            return None
        writer.write(guard.own_credential)
        return _WatchedReader(reader, guard, caller), _WatchedWriter(writer, guard, caller)


def _not_admitted(peer: PeerID, reason: str) -> P2PHandlerError:
    if reason == STRANGER:
        return P2PHandlerError(f"{peer} has no credential for this swarm")
    return P2PHandlerError(f"nothing is asked of {peer}: it was banned, or its invite has expired")


class _WatchedReader:
    """What comes through a stream, none of which is read before its sender has shown a credential, or when it is out.

    Not when the stream is opened: the credential of who is called comes with the answer, and costs no time of its own.
    """

    def __init__(self, reader: asyncio.StreamReader, guard: Guard, peer: PeerID, is_proven: bool = True):
        self._reader, self._guard, self._peer = reader, guard, peer
        self._is_proven = is_proven

    async def readexactly(self, count: int) -> bytes:
        if not self._is_proven:
            shown = await self._reader.readexactly(CREDENTIAL_BYTES)
            if reason := self._guard.why_not(shown, self._peer):
                raise _not_admitted(self._peer, reason)
            self._is_proven = True
        data = await self._reader.readexactly(count)
        if reason := self._guard.why_no_more(self._peer):
            raise _not_admitted(self._peer, reason)
        return data

    def feed_eof(self) -> None:
        """End it: nothing more is read."""
        self._reader.feed_eof()


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
