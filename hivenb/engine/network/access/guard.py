"""Whom a peer of a private swarm talks to: those who show a good credential, and are not banned.

Each request and each stream begins with the caller's credential (:mod:`hivenb.engine.network.access.tokens`), and what
comes back with that of the callee.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from multiprocessing.sharedctypes import RawArray
from typing import Any

from hivemind.dht import DHTNode
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.control import P2PHandlerError
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.p2p.p2p_daemon_bindings.p2pclient import Client
from hivemind.utils import get_logger

from hivenb.engine.network.access.ban_list import SharedBanList
from hivenb.engine.network.access.tokens import CREDENTIAL_BYTES, Credential, Membership, read_credential
from hivenb.engine.network.reachability import ask

#: Credentials of others that a peer keeps, so that each is verified once.
_KEPT_CREDENTIALS = 4096

#: All that those get who are not let in, and plain hivemind logs.
STRANGER = "this swarm is private: only peers of hivenb can join it, with its invite"
EXPIRED = "the invite that this peer came by has expired"
BANNED = "this peer was banned from the swarm, or the one who passed its invite on was"

#: Why a peer is not let in, the most telling first.
REFUSALS = (BANNED, EXPIRED, STRANGER)


class Guard:
    """Shows a peer's credential, and looks at those of others.

    :param membership: of this peer
    :param own_id: its id
    :param ban_list: who is banned; by default nobody is
    """

    def __init__(self, membership: Membership, own_id: PeerID, ban_list: SharedBanList | None = None):
        self._admin = membership.key.admin
        self._ban_list = SharedBanList(self._admin) if ban_list is None else ban_list
        #: what this peer puts before what it sends
        self.own_credential = membership.key.credential_of(own_id.to_bytes())
        #: good credentials by the ids of their peers, expired ones among them
        self.seen: dict[bytes, Credential] = {}
        self._verified: dict[tuple[bytes, bytes], Credential] = {}

    def why_not(self, shown: bytes, peer: PeerID) -> str | None:
        """Why a peer is not let in, in words; ``None`` if it is.

        :param shown: what it has sent for a credential, any bytes
        :param peer: its id, as libp2p has authenticated it
        """
        peer_id = peer.to_bytes()
        known = self._verified.get((peer_id, shown)) or self._verify(peer_id, shown)
        return STRANGER if known is None else self._why_excluded(peer_id, known)

    def why_no_more(self, peer: PeerID) -> str | None:
        """Why a peer, which may have been let in before, is not talked to any more; ``None`` if nothing is known."""
        peer_id = peer.to_bytes()
        return self._why_excluded(peer_id, self.seen.get(peer_id))

    def _verify(self, peer_id: bytes, shown: bytes) -> Credential | None:
        known = read_credential(shown, peer_id, self._admin)
        if known is not None:  # what strangers show takes no room from members
            if len(self._verified) >= _KEPT_CREDENTIALS:
                self._verified.clear()
                self.seen.clear()
            self._verified[peer_id, shown] = self.seen[peer_id] = known
        return known

    def _why_excluded(self, peer_id: bytes, known: Credential | None) -> str | None:
        if self._ban_list.list.bans(peer_id, known):
            return BANNED
        return EXPIRED if known is not None and known.expires <= time.time() else None


# -- admission status ------------------------------------------------------------------------------------------------
#
# Whether the others let this peer in, as all its processes see it: one to whom nobody talks has to know why.


#: Seconds for which nobody has answered this peer, and refusals meanwhile, until it is known to be out: a member that
#: says so falsely is not believed while any other one answers.
UNANSWERED_FOR, REFUSALS_UNTIL = 5.0, 2

_REASONS = (BANNED, EXPIRED)


class AdmissionStatus:
    """What the others have said to the requests of this peer. The DHT's process writes, all read."""

    def __init__(self) -> None:
        self._answered_at = RawArray(ctypes.c_double, [time.monotonic()])
        self._refusals = RawArray(ctypes.c_int, [0, 0])

    def note_answer(self) -> None:
        """Another peer has answered."""
        self._refusals[0], self._answered_at[0] = 0, time.monotonic()

    def note_refusal(self, reason: str) -> None:
        """Another peer has not, and has said why."""
        if reason in _REASONS:
            self._refusals[1] = _REASONS.index(reason)
            self._refusals[0] += 1

    @property
    def why_excluded(self) -> str | None:
        """Why nobody lets this peer in any more; ``None`` as long as somebody does."""
        is_out = self._refusals[0] >= REFUSALS_UNTIL and time.monotonic() - self._answered_at[0] > UNANSWERED_FOR
        return _REASONS[self._refusals[1]] if is_out else None


# -- strangers -------------------------------------------------------------------------------------------------------
#
# In the DHT's process: hangs up on those who are connected to a private swarm, and are no members of it.
#
# libp2p's daemon asks nobody for a credential before it relays, has no list of whom to relay for, and cannot be told
# not to. But what is relayed ends with the connection to whom it is relayed for.


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


# -- stream limits ---------------------------------------------------------------------------------------------------
#
# How many streams another peer may have open, and how long it may take to say something in one.


#: Streams that a peer may have open to one process at a time. One of ours needs two or three in a round, and each may
#: stay open for ten seconds after that.
MOST_STREAMS = 64

#: Seconds for the first word in a stream, and for a message of any length.
WITHIN = 30.0

#: Bytes in a second of a message that has begun, at least.
SLOWEST = 4096.0


#: Streams open to one process, of one peer and in all, whose openers have proven nothing yet.
MOST_UNPROVEN_OF_ONE, MOST_UNPROVEN = 16, 256


class UnprovenStreams:
    """Streams of which nobody knows yet who has opened them. Where there are too many, the oldest makes room.

    Who belongs here proves it as soon as a message takes; who keeps others out by many streams keeps none of them long.
    """

    def __init__(self) -> None:
        self._open: dict[asyncio.StreamWriter, PeerID] = {}

    @contextlib.contextmanager
    def waiting(self, peer: PeerID, writer: asyncio.StreamWriter) -> Iterator[None]:
        """Count a stream for as long as its opener has proven nothing; it may be closed meanwhile.

        :param peer: who has opened it, as libp2p says
        :param writer: of the stream
        """
        of_this_one = [one for one, opener in self._open.items() if opener == peer]
        if len(of_this_one) >= MOST_UNPROVEN_OF_ONE:
            self._close(of_this_one[0])
        elif len(self._open) >= MOST_UNPROVEN:
            self._close(next(iter(self._open)))
        self._open[writer] = peer
        try:
            yield
        finally:
            self._open.pop(writer, None)

    def _close(self, writer: asyncio.StreamWriter) -> None:
        logger.debug(f"{self._open.pop(writer)} has proven nothing, and its stream makes room for another one")
        writer.close()


class SilentStreamError(asyncio.IncompleteReadError):
    """A peer has not sent in time what it began; taken for the end of its stream."""


class TimedReader:
    """What reads a stream, and waits for no message for ever that has begun, nor for the first one.

    :param reader: of the stream
    """

    def __init__(self, reader: Any):
        self._reader, self._is_new = reader, True

    async def readexactly(self, count: int) -> bytes:
        """As the stream's own method.

        :raises SilentStreamError: if it takes too long
        :raises IncompleteReadError: if whoever writes it has closed it, or is gone
        """
        is_begin = count <= 1 and not self._is_new  # of a message, which may come later
        self._is_new = False
        # a timer and no asyncio.wait_for, which makes a task of each of the three reads of a message
        seconds = WITHIN + count / SLOWEST
        timer = None if is_begin else asyncio.get_running_loop().call_later(seconds, self._reader.feed_eof)
        try:
            data: bytes = await self._reader.readexactly(count)
        except ConnectionError as e:
            # hivemind knows of one way only in which a stream ends, and takes the others for errors of this peer
            raise asyncio.IncompleteReadError(b"", count) from e
        except asyncio.IncompleteReadError as e:
            if timer is not None and timer.when() <= asyncio.get_running_loop().time():
                raise SilentStreamError(b"", count) from e
            raise
        finally:
            if timer is not None:
                timer.cancel()
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


#: Answers a stream that another peer has opened: what hivemind tells of it, what reads it, what writes to it.
StreamHandler = Callable[[Any, Any, Any], Awaitable[None]]


class OpenStreams:
    """How many streams each peer has open here: anybody may open them until there is no descriptor, else."""

    def __init__(self) -> None:
        self._open: Counter[PeerID] = Counter()

    @property
    def total(self) -> int:
        """Of all peers together."""
        return sum(self._open.values())

    def counted(self, handler: StreamHandler) -> StreamHandler:
        """The same handler, which closes a stream of a peer that has too many, and waits for none without end."""

        async def answer(stream: Any, reader: Any, writer: asyncio.StreamWriter) -> None:
            peer = stream.peer_id
            if self._open[peer] >= MOST_STREAMS:
                logger.debug(f"{peer} has {MOST_STREAMS} streams open; one more was closed")
                writer.close()
                return
            self._open[peer] += 1
            try:
                await handler(stream, TimedReader(reader), writer)
            finally:
                self._open[peer] -= 1
                self._open += Counter()  # forgets those that have none

        return answer


# -- gathered writes -------------------------------------------------------------------------------------------------
#
# Each write to a stream wakes the daemon, which sends what it has read as a packet of its own, and that wakes the other
# peer's daemon and the other peer: three times for each of hivemind's messages, whose kind, length and content it
# writes one after the other.


#: Bytes from which on nothing is gained by more: all of a large part in one piece would take memory for a second time.
GATHERED = 1 << 16


class GatheringWriter:
    """What writes to a stream, when it is drained, in as few pieces as are worth it.

    :param writer: of the stream
    """

    def __init__(self, writer: asyncio.StreamWriter):
        self._writer = writer
        self._pieces: list[Any] = []

    def write(self, data: Any) -> None:
        """Have that written by the next :meth:`drain`."""
        self._pieces.append(data)

    async def drain(self) -> None:
        """As the stream's own method."""
        self._flush()
        await self._writer.drain()

    def close(self) -> None:
        """As the stream's own method."""
        if not self._writer.is_closing():
            self._flush()
        self._writer.close()

    def _flush(self) -> None:
        pieces, self._pieces = self._pieces, []
        begun, size = 0, 0
        for count, piece in enumerate(pieces, start=1):
            size += len(piece)
            if size >= GATHERED or count == len(pieces):
                gathered = pieces[begun:count]
                self._writer.write(gathered[0] if len(gathered) == 1 else b"".join(gathered))
                begun, size = count, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


# -- guarded client --------------------------------------------------------------------------------------------------
#
# All bytes between peers of a private swarm go through here; a stranger's are dropped before anything reads them.


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
