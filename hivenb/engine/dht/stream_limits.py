"""How many streams another peer may have open, and how long it may take to say something in one."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from hivemind.p2p import P2P, PeerID
from hivemind.utils import get_logger

logger = get_logger(__name__)

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
        try:
            data: bytes = await asyncio.wait_for(
                self._reader.readexactly(count), None if is_begin else WITHIN + count / SLOWEST
            )
        except (TimeoutError, asyncio.TimeoutError) as e:
            raise SilentStreamError(b"", count) from e
        except ConnectionError as e:
            # hivemind knows of one way only in which a stream ends, and takes the others for errors of this peer
            raise asyncio.IncompleteReadError(b"", count) from e
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


class LimitsStreams(P2P):
    """Mixin to put *before* ``hivemind``'s ``P2P``, in which anybody may open streams until there is no descriptor."""

    def __init__(self) -> None:
        super().__init__()
        self._open: Counter[PeerID] = Counter()

    async def add_binary_stream_handler(self, name: str, handler: Any, balanced: bool = False) -> None:
        async def limited(stream: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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

        await super().add_binary_stream_handler(name, limited, balanced)
