"""No stream lacks its end: whoever reads it closes it, whoever answers waits for that. Real daemons, real averagers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind tells a stream by typing's own class

import pytest
import torch
from hivemind.optim.grad_averager import GradientAverager as PlainGradientAverager
from hivemind.p2p import P2PContext, ServicerBase
from hivemind.proto import averaging_pb2
from tiny import LOOPBACK

from hivenb.engine.averaging.gradient_averager import GradientAverager
from hivenb.engine.network.daemon import TiedP2P
from hivenb.engine.network.dht import DHT
from hivenb.engine.network.streams import (
    END_OF_STATE,
    aggregate_parts,
    closed_after,
    download_state,
    left_open,
    with_end,
)

#: Seconds that no test takes.
BOUND = 30.0

COUNT = 4


class Answering(ServicerBase):
    """Answers each request with so many messages.

    :param seconds: that it leaves the stream open
    :param refuses: whether that is not what was asked for
    """

    def __init__(self, seconds: float, count: int = COUNT, size: int = 100, refuses: bool = False):
        self._seconds, self._count, self._size, self._refuses = seconds, count, size, refuses
        self.ended = asyncio.Event()

    async def rpc_answer(
        self, request: averaging_pb2.DownloadRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        try:
            async for message in left_open(self._messages(), self._seconds, lambda _: not self._refuses):
                yield message
        finally:
            self.ended.set()

    async def _messages(self) -> AsyncIterator[averaging_pb2.DownloadData]:
        for number in range(1, self._count + 1):
            yield averaging_pb2.DownloadData(metadata=bytes([number]) * self._size)


Ask = Callable[[], Coroutine[Any, Any, AsyncGenerator[Any, None]]]
Conversation = Callable[[Answering, Ask], Coroutine[Any, Any, None]]


Talk = Callable[..., None]


@pytest.fixture(scope="module")
def talk() -> Iterator[Talk]:
    """Lets somebody ask a peer through the daemons of both, which are those of all these tests."""
    loop = asyncio.new_event_loop()
    run = loop.run_until_complete
    answering = run(TiedP2P.create(**LOOPBACK))
    asking = run(TiedP2P.create(**LOOPBACK, initial_peers=run(answering.get_visible_maddrs())))

    def bounded(servicer: Callable[[], Answering], conversation: Conversation, bound: float = 2 * BOUND) -> None:
        async def both() -> None:
            server = servicer()
            await server.add_p2p_handlers(answering)
            try:
                stub = Answering.get_stub(asking, answering.peer_id)
                await conversation(server, lambda: stub.rpc_answer(averaging_pb2.DownloadRequest()))
            finally:
                await server.remove_p2p_handlers(answering)

        run(asyncio.wait_for(both(), bound))

    yield bounded
    for daemon in (asking, answering):
        run(daemon.shutdown())
    loop.close()


def number_of(message: averaging_pb2.DownloadData) -> int:
    return message.metadata[0]


def is_last(message: averaging_pb2.DownloadData) -> bool:
    return number_of(message) == COUNT


@pytest.mark.process
def test_the_side_that_reads_closes_the_stream(talk: Talk) -> None:
    async def conversation(server: Answering, ask: Ask) -> None:
        stream = await ask()
        read = [number_of(await anext(stream)) for _ in range(COUNT)]
        assert read == list(range(1, COUNT + 1))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(server.ended.wait(), 0.5)
        await stream.aclose()
        await asyncio.wait_for(server.ended.wait(), BOUND)

    talk(lambda: Answering(10 * BOUND), conversation)


@pytest.mark.process
def test_what_was_read_to_its_last_message_is_closed(talk: Talk) -> None:
    async def conversation(server: Answering, ask: Ask) -> None:
        read = [number_of(message) async for message in closed_after(await ask(), is_last)]
        assert read == list(range(1, COUNT + 1))
        await asyncio.wait_for(server.ended.wait(), BOUND)

    talk(lambda: Answering(10 * BOUND), conversation)


@pytest.mark.process
def test_nobody_waits_for_ever_for_it_to_be_closed(talk: Talk) -> None:
    async def conversation(server: Answering, ask: Ask) -> None:
        async with aclosing(await ask()) as stream:
            assert [number_of(message) async for message in stream] == list(range(1, COUNT + 1))

    talk(lambda: Answering(0.1), conversation)


@pytest.mark.process
@pytest.mark.parametrize("answer", [{"count": 0}, {"refuses": True}], ids=["nothing", "refusal"])
def test_where_there_is_nothing_to_read_the_stream_is_closed_at_once(talk: Talk, answer: dict[str, Any]) -> None:
    async def conversation(server: Answering, ask: Ask) -> None:
        await _read(await ask())
        await asyncio.wait_for(server.ended.wait(), BOUND)

    talk(lambda: Answering(10 * BOUND, **answer), conversation)


@pytest.mark.process
@pytest.mark.long
def test_none_of_thousands_lacks_its_end(talk: Talk) -> None:
    """Where the side that answers closes them, it is one in 300 to 5,000."""

    async def conversation(server: Answering, ask: Ask) -> None:
        for _ in range(10_000):
            assert len([message async for message in closed_after(await ask(), is_last)]) == COUNT

    talk(lambda: Answering(10 * BOUND, size=100_000), conversation, 10 * BOUND)


async def _numbers(until: int) -> AsyncGenerator[int, None]:
    for number in range(until):
        yield number


async def _read(stream: AsyncIterator[Any]) -> list[Any]:
    return [message async for message in stream]


def test_a_stream_of_parts_is_closed_when_all_were_sent_and_all_have_come_back() -> None:
    async def conversation() -> None:
        may_send, closed = asyncio.Event(), asyncio.Event()
        sending: list[asyncio.Task[Any]] = []

        async def parts() -> AsyncIterator[int]:
            yield 0
            await may_send.wait()

        async def call(requests: AsyncIterator[int]) -> AsyncGenerator[int, None]:
            sending.append(asyncio.create_task(_read(requests)))

            async def responses() -> AsyncGenerator[int, None]:
                try:
                    for number in itertools.count():
                        yield number
                finally:
                    closed.set()

            return responses()

        averages = await aggregate_parts(call, 3, parts())
        assert [await anext(averages) for _ in range(3)] == [0, 1, 2]
        ending = asyncio.create_task(anext(averages, None))
        await asyncio.wait({ending}, timeout=0.1)
        assert not closed.is_set(), "who is to average them would take this peer for one that has gone"
        may_send.set()
        assert await ending is None
        assert closed.is_set()
        assert await sending[0] == [0]

    asyncio.run(asyncio.wait_for(conversation(), BOUND))


def test_a_state_ends_with_a_message_that_says_so() -> None:
    part = averaging_pb2.DownloadData(metadata=b"state")

    async def state(*messages: Any) -> AsyncGenerator[Any, None]:
        for message in messages:
            yield message

    async def call(request: Any) -> AsyncGenerator[Any, None]:
        return state(part, END_OF_STATE, part)

    async def conversation() -> None:
        assert await _read(with_end(state(part))) == [part, END_OF_STATE]
        assert await _read(with_end(state())) == []
        assert await _read(await download_state(call, averaging_pb2.DownloadRequest())) == [part, END_OF_STATE]

    asyncio.run(conversation())


@pytest.mark.parametrize(
    ("taking", "giving"),
    [
        (GradientAverager, GradientAverager),
        (GradientAverager, PlainGradientAverager),
        (PlainGradientAverager, GradientAverager),
    ],
    ids=["among ours", "plain gives", "plain takes"],
)
def test_ours_and_plain_hivemind_understand_each_others_states(
    giving: type[GradientAverager],
    taking: type[GradientAverager],
    dht: DHT,
    joining_dht: DHT,
    make_averager: Callable[..., GradientAverager],
    eventually: Callable[..., None],
) -> None:
    # of several messages, since hivemind cuts tensors into pieces of 2**16 bytes
    giver = make_averager(dht, shape=100_000, kind=giving, declare_state_period=0.5)
    taker = make_averager(joining_dht, shape=100_000, kind=taking, allow_state_sharing=False)
    with giver.get_tensors() as (gradient,):
        gradient.copy_(torch.arange(100_000))
    downloaded: list[Any] = []

    def was_downloaded() -> bool:
        downloaded[:] = [taker.load_state_from_peers(timeout=BOUND)]
        return downloaded != [None]

    eventually(was_downloaded, BOUND)
    ((_, (received,)),) = downloaded
    assert torch.equal(received, torch.arange(100_000, dtype=torch.float32))
