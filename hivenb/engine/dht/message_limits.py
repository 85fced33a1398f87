"""How long a message of another peer may be: one that is longer is refused before it is read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from hivemind.averaging.partition import DEFAULT_PART_SIZE_BYTES
from hivemind.p2p import P2P, P2PHandlerError, PeerID
from hivemind.utils import get_logger

logger = get_logger(__name__)

#: How many times as long as a part of a tensor a message may be: parts are cut by what a codec is expected to make of
#: them, and another one may make up to four times as much.
MARGIN = 4

#: Bytes that a message may always have; libp2p's daemon allows as many for a request that is no stream.
SHORTEST_LIMIT = 4 * 1024**2


def limit_for(part_size_bytes: int | None) -> int:
    """Bytes that a message may have where tensors are cut into parts of a size.

    :param part_size_bytes: hivemind's own if ``None``
    """
    return max(SHORTEST_LIMIT, MARGIN * (part_size_bytes or DEFAULT_PART_SIZE_BYTES))


class RequestTooLongError(asyncio.IncompleteReadError):
    """A peer wanted to send more than it may; taken for the end of its stream."""


class BoundedReader:
    """What reads a stream, and nothing that is too long.

    :param reader: of the stream
    :param check: called with the bytes that are to be read next; raises if they are too many
    """

    def __init__(self, reader: asyncio.StreamReader, check: Callable[[int], None]):
        self._reader, self._check = reader, check

    async def readexactly(self, count: int) -> bytes:
        """As the stream's own method, after the check."""
        self._check(count)
        return await self._reader.readexactly(count)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


class LimitsMessages(P2P):
    """Mixin to put *before* ``hivemind``'s ``P2P``, which reads whatever length another peer announces.

    A thousand megabytes in one message of a stream then cost this peer no memory. What is no stream goes through the
    daemon, which refuses more than four megabytes by itself.
    """

    #: bytes that a message of a stream may have
    longest_message = limit_for(None)

    async def add_binary_stream_handler(self, name: str, handler: Any, balanced: bool = False) -> None:
        async def bounded(stream: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            def check(count: int) -> None:
                if count > self.longest_message:
                    logger.warning(f"{stream.peer_id} wanted to send a message of {count:,} bytes; it was not read")
                    raise RequestTooLongError(b"", count)

            await handler(stream, BoundedReader(reader, check), writer)

        await super().add_binary_stream_handler(name, bounded, balanced)

    async def call_binary_stream_handler(self, peer_id: PeerID, handler_name: str) -> Any:
        stream, reader, writer = await super().call_binary_stream_handler(peer_id, handler_name)

        def check(count: int) -> None:
            if count > self.longest_message:
                raise P2PHandlerError(f"{peer_id} wanted to answer with a message of {count:,} bytes")

        return stream, BoundedReader(reader, check), writer
