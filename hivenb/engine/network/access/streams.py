"""Streams between peers: how many a peer may have open, how long it may take to say something, and how that is sent."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from hivemind.p2p import PeerID
from hivemind.utils import get_logger

logger = get_logger(__name__)

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
