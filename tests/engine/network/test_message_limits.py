from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hivemind.p2p import P2P, P2PHandlerError
from hivemind.proto import averaging_pb2
from tiny import LOOPBACK

from hivenb.engine.network.daemon import MARGIN, SHORTEST_LIMIT, BoundedReader, RequestTooLongError, TiedP2P, limit_for


def of_size(count: int) -> averaging_pb2.DownloadData:
    return averaging_pb2.DownloadData(metadata=b"\0" * count)


def test_the_limit_leaves_room_for_the_largest_part():
    assert limit_for(None) == limit_for(1000) == SHORTEST_LIMIT
    assert limit_for(64 * 2**20) == MARGIN * 64 * 2**20


def test_what_is_too_long_is_not_read():
    async def main() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data((2**30).to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER))

        def check(count: int) -> None:
            if count > 1000:
                raise RequestTooLongError(b"", count)

        bounded = BoundedReader(reader, check)
        with pytest.raises(RequestTooLongError):
            await asyncio.wait_for(P2P.receive_raw_data(bounded), 5)
        reader.feed_data((1000).to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER) + b"x" * 1000)
        assert await P2P.receive_raw_data(bounded) == b"x" * 1000
        assert not bounded.at_eof()

    asyncio.run(main())


async def _announce(p2p: P2P, handler: str, peer: Any, count: int) -> bytes:
    """What the other side sends after the announcement of a message of a length, and of nothing more."""
    _, reader, writer = await p2p._client.stream_open(peer, (handler,))
    writer.write(P2P.MESSAGE_MARKER + count.to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER))
    await writer.drain()
    try:
        return await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()


async def _swapping(received: list[int], size_of_answer: int) -> tuple[TiedP2P, TiedP2P]:
    async def handler(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            received.append(len(request.metadata))
            yield of_size(size_of_answer)

    server = await TiedP2P.create(**LOOPBACK)
    client = await TiedP2P.create(**LOOPBACK, initial_peers=await server.get_visible_maddrs())
    await server.add_protobuf_handler(
        "swap", handler, averaging_pb2.DownloadData, stream_input=True, stream_output=True
    )
    return server, client


@pytest.mark.process
def test_a_long_request_is_refused_and_the_next_one_answered():
    async def main() -> None:
        received: list[int] = []
        server, client = await _swapping(received, 10)
        try:
            assert await _announce(client, "swap", server.peer_id, 2**30) == b""  # closed, not waited for
            nearly = TiedP2P.longest_message - 100
            responses = await client.iterate_protobuf_handler(
                server.peer_id, "swap", of_size(nearly), averaging_pb2.DownloadData
            )
            assert [len(one.metadata) async for one in responses] == [10]
            assert received == [nearly]
        finally:
            await client.shutdown()
            await server.shutdown()

    asyncio.run(main())


@pytest.mark.process
def test_a_long_answer_is_an_error():
    async def main() -> None:
        server, client = await _swapping([], 2 * TiedP2P.longest_message)
        try:
            call = client.iterate_protobuf_handler(server.peer_id, "swap", of_size(1), averaging_pb2.DownloadData)
            with pytest.raises(P2PHandlerError, match="wanted to answer with a message of"):
                [one async for one in await call]
        finally:
            await client.shutdown()
            await server.shutdown()

    asyncio.run(main())
