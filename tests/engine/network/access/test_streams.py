from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

import pytest
from hivemind.p2p import P2P, PeerID
from hivemind.proto import averaging_pb2
from tiny import LOOPBACK

from hivenb.engine.network.access import streams
from hivenb.engine.network.access.streams import GatheringWriter, SilentStreamError, TimedReader, UnprovenStreams
from hivenb.engine.network.daemon import TiedP2P


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "WITHIN", 0.2)
    monkeypatch.setattr(streams, "SLOWEST", 1000.0)


@pytest.mark.usefixtures("hurried")
def test_the_first_word_and_what_has_begun_have_their_time_and_what_lies_between_has_not():
    async def main() -> None:
        stream = asyncio.StreamReader()
        with pytest.raises(SilentStreamError):
            await TimedReader(stream).readexactly(1)
        stream = asyncio.StreamReader()
        reader = TimedReader(stream)
        stream.feed_data(b"x")
        assert await reader.readexactly(1) == b"x"
        later = asyncio.ensure_future(reader.readexactly(1))
        assert not (await asyncio.wait({later}, timeout=0.5))[0], "a stream may rest between two messages"
        stream.feed_data(b"y")
        assert await later == b"y"
        slow = asyncio.ensure_future(reader.readexactly(1000))
        for _ in range(4):
            await asyncio.sleep(0.15)
            stream.feed_data(b"z" * 100)
        with pytest.raises(SilentStreamError):
            await slow

    asyncio.run(main())


def test_one_who_is_killed_has_ended_its_stream():
    """hivemind takes a broken pipe for an error of this peer's, and writes its traceback into the log."""

    async def main() -> None:
        for count in (1, 100):
            stream = asyncio.StreamReader()
            stream.set_exception(BrokenPipeError())
            with pytest.raises(asyncio.IncompleteReadError):
                await TimedReader(stream).readexactly(count)

    asyncio.run(main())


class Stream:
    """A stream that somebody has opened."""

    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


def test_the_oldest_of_those_who_prove_nothing_make_room_for_others():
    streams, opened = UnprovenStreams(), []

    def opens(stack: ExitStack, peer: PeerID) -> Stream:
        opened.append(Stream())
        stack.enter_context(streams.waiting(peer, opened[-1]))  # type: ignore[arg-type]
        return opened[-1]

    with ExitStack() as stack:
        good = opens(stack, PeerID(b"good"))
        of_one = [opens(stack, PeerID(b"stranger")) for _ in range(1000)]
        assert not good.is_closed, "one stranger can only close its own"
        assert [one.is_closed for one in of_one] == [True] * 984 + [False] * 16
        with streams.waiting(PeerID(b"late"), Stream()):  # type: ignore[arg-type]
            pass  # it has shown its credential, and is no longer counted
        for number in range(1000):
            opens(stack, PeerID(f"stranger {number}".encode()))
        assert sum(not one.is_closed for one in opened) == 256
        assert not opened[-1].is_closed
    last = Stream()
    with streams.waiting(PeerID(b"stranger 1"), last):  # type: ignore[arg-type]
        assert not last.is_closed, "those that have ended are not counted"


@pytest.mark.process
@pytest.mark.usefixtures("hurried")
def test_silent_streams_are_few_and_closed_and_do_not_keep_others_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streams, "MOST_STREAMS", 5)
    monkeypatch.setattr(streams, "WITHIN", 3.0)

    async def handler(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            yield request

    async def answered(p2p: P2P, peer: Any) -> list[bytes]:
        call = p2p.iterate_protobuf_handler(
            peer, "echo", averaging_pb2.DownloadData(metadata=b"hello"), averaging_pb2.DownloadData
        )
        return [one.metadata async for one in await call]

    async def main() -> None:
        server = await TiedP2P.create(**LOOPBACK)
        addresses = await server.get_visible_maddrs()
        silent, other = [await P2P.create(**LOOPBACK, initial_peers=addresses) for _ in range(2)]
        try:
            await server.add_protobuf_handler(
                "echo", handler, averaging_pb2.DownloadData, stream_input=True, stream_output=True
            )
            streams = [await silent.call_binary_stream_handler(server.peer_id, "echo") for _ in range(20)]
            await asyncio.sleep(1.0)
            assert server._open_streams.total == 5
            assert await answered(other, server.peer_id) == [b"hello"]
            for _, reader, _ in streams:
                assert await asyncio.wait_for(reader.read(), 10) == b""
            assert server._open_streams.total == 0
            assert await answered(silent, server.peer_id) == [b"hello"]
        finally:
            for p2p in (silent, other, server):
                await p2p.shutdown()

    asyncio.run(main())


class Line:
    """What a stream is written to, and what was written at once."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.is_closed = False

    def write(self, data: Any) -> None:
        assert not self.is_closed
        self.sent.append(bytes(data))

    async def drain(self) -> None:
        """All has been sent."""

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed


def test_a_message_is_written_at_once_with_what_came_before_it():
    async def main() -> None:
        line: Any = Line()
        writer: Any = GatheringWriter(line)
        writer.write(b"credential")
        for size in (10, 200_000):
            await P2P.send_protobuf(averaging_pb2.DownloadData(metadata=b"x" * size), writer)
        assert len(line.sent) == 1 + 4, "what begins a message is a piece of its own"
        assert line.sent[0].startswith(b"credential")
        reader = asyncio.StreamReader()
        reader.feed_data(b"".join(line.sent).removeprefix(b"credential"))
        for size in (10, 200_000):
            message, error = await P2P.receive_protobuf(averaging_pb2.DownloadData, reader)
            assert (len(message.metadata), error) == (size, None)

    asyncio.run(main())


def test_what_was_written_last_is_sent_before_a_stream_is_closed():
    line: Any = Line()
    writer: Any = GatheringWriter(line)
    writer.write(b"credential")
    writer.close()
    writer.close()
    assert line.sent == [b"credential"]
    assert line.is_closed
