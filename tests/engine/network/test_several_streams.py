"""One exchange over several streams: neither side's all-reduce sees more than one."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind tells a stream by typing's own class

import pytest
import torch
from hivemind.optim.grad_averager import GradientAverager as PlainGradientAverager
from hivemind.p2p import P2PContext
from hivemind.proto import averaging_pb2
from hivemind.utils.asyncio import achain, as_aiter

from hivenb.engine.averaging.gradient_averager import GradientAverager
from hivenb.engine.network.access.streams import MOST_UNPROVEN
from hivenb.engine.network.dht import DHT
from hivenb.engine.network.streams import STREAMS, JoinedStreams, aggregate_in_streams, place_of, streams_for

#: Seconds that no test takes.
BOUND = 30.0

GROUP = b"group"

#: Of which each of two peers averages ten parts of 2**17.
NUMBERS = 20 * 2**17


@pytest.mark.parametrize(("count", "expected"), [(1, 1), (3, 1), (4, 2), (7, 3), (8, STREAMS), (1000, STREAMS)])
def test_few_parts_need_few_streams(count: int, expected: int) -> None:
    assert streams_for(count, count << 19, 2) == expected


@pytest.mark.parametrize(("size", "expected"), [(0, 1), (40_000, 1), (1 << 19, 2), (1 << 20, STREAMS)])
def test_few_bytes_need_few_streams_however_many_tensors_they_are_of(size: int, expected: int) -> None:
    assert streams_for(160, size, 2) == expected


@pytest.mark.parametrize(("peers", "expected"), [(2, STREAMS), (32, STREAMS), (65, 1), (200, 1)])
def test_the_streams_of_a_large_group_are_no_more_than_may_be_unproven(peers: int, expected: int) -> None:
    assert streams_for(1000, 1 << 30, peers) == expected
    assert (peers - 1) * expected <= MOST_UNPROVEN


@pytest.mark.parametrize(
    ("told", "expected"),
    [(b"", (0, 1)), (b"\1\4", (1, 4)), (b"\4\4", (0, 1)), (b"\0\5", (0, 1)), (b"\0\0", (0, 1)), (b"peer id", (0, 1))],
)
def test_a_stream_that_tells_nothing_of_sense_is_the_only_one(told: bytes, expected: tuple[int, int]) -> None:
    assert place_of(averaging_pb2.AveragingData(peer_id=told)) == expected


class Peer:
    """Who averages, as far as a sender sees it: answers each part with twice its weight."""

    def __init__(self) -> None:
        self.begun: dict[int, averaging_pb2.AveragingData] = {}
        #: whether all was answered, of each stream that was served to its end
        self.whole: dict[int, bool] = {}
        self.all_are_served = asyncio.Event()
        #: also if the sender reads no more
        self.is_served_to_the_end = False
        self.received: list[float] = []
        self.has_seen_the_end = asyncio.Event()
        self.is_to_answer = asyncio.Event()
        self.is_to_answer.set()
        self._joined: JoinedStreams | None = None

    async def call(self, requests: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        answers: asyncio.Queue[Any] = asyncio.Queue()
        serving = asyncio.create_task(self._serve(requests, answers))
        return self._received(serving, answers)

    async def _received(self, serving: asyncio.Task[None], answers: asyncio.Queue[Any]) -> AsyncGenerator[Any, None]:
        try:
            while (answer := await answers.get()) is not None:
                yield answer
            await serving
        finally:
            if not self.is_served_to_the_end:
                serving.cancel()

    async def _serve(self, requests: AsyncIterator[Any], answers: asyncio.Queue[Any]) -> None:
        begins = await anext(requests)
        number, count = place_of(begins)
        self._joined = self._joined or JoinedStreams(count, self._answer)
        assert self._joined.expects(number, count)
        self.begun[number] = begins
        last = None
        try:
            async with aclosing(self._joined.serve(number, achain(as_aiter(begins), requests))) as served:
                async for last in served:
                    answers.put_nowait(last)
            self.whole[number] = last is not None and self._joined.is_whole(number, last)
            if len(self.whole) == count:
                self.all_are_served.set()
        finally:
            answers.put_nowait(None)

    async def _answer(self, parts: AsyncIterator[Any]) -> AsyncIterator[Any]:
        try:
            async for part in parts:
                await self.is_to_answer.wait()
                self.received.append(part.weight)
                yield averaging_pb2.AveragingData(code=averaging_pb2.AVERAGED_PART, weight=2 * part.weight)
        finally:
            self.has_seen_the_end.set()


async def parts(count: int, fails_after: int | None = None) -> AsyncGenerator[Any, None]:
    for number in range(count):
        if number == fails_after:
            raise ValueError("this one cannot be packed")
        code, group = (averaging_pb2.PART_FOR_AVERAGING, GROUP) if number == 0 else (averaging_pb2.NO_CODE, b"")
        yield averaging_pb2.AveragingData(code=code, group_id=group, weight=number)


def talk(conversation: Callable[[Peer], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(conversation(Peer()), BOUND)

    asyncio.run(bounded())


@pytest.mark.parametrize("count", [8, 9, 10, 11, 50])
@pytest.mark.parametrize("streams", [2, 3, STREAMS])
def test_all_parts_are_answered_in_their_order(count: int, streams: int) -> None:
    async def conversation(peer: Peer) -> None:
        answers = await aggregate_in_streams(peer.call, count, parts(count), streams)
        assert [answer.weight async for answer in answers] == [2.0 * number for number in range(count)]
        assert peer.received == list(range(count))
        assert peer.begun.keys() == set(range(streams))
        for begins in peer.begun.values():
            assert (begins.code, begins.group_id) == (averaging_pb2.PART_FOR_AVERAGING, GROUP)

    talk(conversation)


@pytest.mark.parametrize("late", range(STREAMS))
def test_a_stream_whose_end_comes_late_is_not_closed_before(late: int) -> None:
    async def conversation(peer: Peer) -> None:
        async def call(requests: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
            async def ending_late() -> AsyncIterator[Any]:
                begins = await anext(requests)
                yield begins
                async for part in requests:
                    yield part
                if place_of(begins)[0] == late:
                    await asyncio.sleep(0.05)

            return await peer.call(ending_late())

        peer.is_served_to_the_end = True
        answers = await aggregate_in_streams(call, 20, parts(20), STREAMS)
        assert len([answer async for answer in answers]) == 20
        await peer.all_are_served.wait()
        assert all(peer.whole.values())

    talk(conversation)


@pytest.mark.parametrize("after", [0, 1, 6])
def test_a_sender_that_goes_away_is_seen_to(after: int) -> None:
    async def conversation(peer: Peer) -> None:
        answers = await aggregate_in_streams(peer.call, 50, parts(50), STREAMS)
        read = [(await anext(answers)).weight for _ in range(after)]
        assert read == [2.0 * number for number in range(after)]
        if after == 0:
            asking = asyncio.ensure_future(anext(answers))
            await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait({asking})
        await answers.aclose()
        await peer.has_seen_the_end.wait()
        assert len(peer.received) < 50

    talk(conversation)


def test_parts_that_cannot_be_sent_are_an_error() -> None:
    async def conversation(peer: Peer) -> None:
        answers = await aggregate_in_streams(peer.call, 50, parts(50, fails_after=20), STREAMS)
        with pytest.raises(ValueError, match="cannot be packed"):
            _ = [answer async for answer in answers]
        assert peer.received == list(range(20))

    talk(conversation)


def test_who_cannot_be_asked_costs_nothing_that_runs_on() -> None:
    async def conversation(peer: Peer) -> None:
        calls, outer = itertools.count(), asyncio.all_tasks()

        async def call(requests: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
            if next(calls) == 2:
                raise OSError("no route")
            return await peer.call(requests)

        with pytest.raises(OSError, match="no route"):
            await aggregate_in_streams(call, 50, parts(50), STREAMS)
        while asyncio.all_tasks() != outer:
            await asyncio.sleep(0.01)

    talk(conversation)


def test_who_gives_up_while_streams_are_opened_leaves_nothing_that_runs_on() -> None:
    async def conversation(peer: Peer) -> None:
        before, is_opening = asyncio.all_tasks(), asyncio.Event()

        async def call(requests: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
            is_opening.set()
            await asyncio.Event().wait()
            raise AssertionError

        opening = asyncio.create_task(aggregate_in_streams(call, 50, parts(50), STREAMS))
        await is_opening.wait()
        opening.cancel()
        while asyncio.all_tasks() != before:
            await asyncio.sleep(0.01)

    talk(conversation)


def test_parts_are_taken_while_nobody_takes_answers_and_not_without_end() -> None:
    async def conversation(peer: Peer) -> None:
        peer.is_to_answer.clear()
        taken: list[int] = []

        async def noted() -> AsyncGenerator[Any, None]:
            async for part in parts(1000):
                taken.append(int(part.weight))
                yield part

        answers = await aggregate_in_streams(peer.call, 1000, noted(), STREAMS)
        asking = asyncio.ensure_future(anext(answers))
        before = -1
        while len(taken) > before:
            before = len(taken)
            await asyncio.sleep(0.05)
        assert STREAMS < before < 8 * STREAMS
        peer.is_to_answer.set()
        assert (await asking).weight == 0
        assert len([answer async for answer in answers]) == 999

    talk(conversation)


def test_a_stream_is_served_once() -> None:
    async def conversation(peer: Peer) -> None:
        joined = JoinedStreams(2, peer._answer)
        begins = averaging_pb2.AveragingData(peer_id=b"\0\2")
        assert joined.expects(0, 2)
        serving = asyncio.ensure_future(anext(joined.serve(0, as_aiter(begins))))
        await asyncio.wait({serving})
        assert not joined.expects(0, 2)
        assert not joined.expects(1, 3)
        assert joined.expects(1, 2)

    talk(conversation)


class Noting(GradientAverager):
    """Notes in a folder which streams it was sent."""

    folder: Path

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        begins = await anext(stream)
        number, count = place_of(begins)
        (self.folder / f"{number} of {count}").touch()
        async for message in super().rpc_aggregate_part(achain(as_aiter(begins), stream), context):
            yield message


@pytest.mark.parametrize("other", [GradientAverager, PlainGradientAverager], ids=["ours", "plain"])
def test_two_peers_average_a_large_model(
    other: type[Any],
    dht: DHT,
    joining_dht: DHT,
    make_averager: Callable[..., Any],
    expect_each_other: Callable[..., None],
    tmp_path: Path,
) -> None:
    noting = type("NotingThere", (Noting,), {"folder": tmp_path})
    settings = {"min_matchmaking_time": 5.0, "request_timeout": 2.0, "target_group_size": 2}
    averagers = [
        make_averager(own, NUMBERS, kind, **settings)
        for own, kind in zip((dht, joining_dht), (noting, other), strict=True)
    ]
    if other is GradientAverager:
        expect_each_other(*averagers, epoch=1)
    for value, averager in enumerate(averagers, start=1):
        averager.parameters[0].grad = torch.arange(NUMBERS, dtype=torch.float32).mul_(value)
        averager.accumulate_grads_(1)
    controls = [averager.step(gather=1, timeout=60.0, wait=False) for averager in averagers]
    for averager, control in zip(averagers, controls, strict=True):
        assert len(control.result(60)) == 2
        with averager.get_tensors() as (gradient,):
            assert torch.allclose(gradient, torch.arange(NUMBERS, dtype=torch.float32).mul_(1.5))
    expected = {"0 of 1"} if other is PlainGradientAverager else {f"{number} of {STREAMS}" for number in range(STREAMS)}
    assert {path.name for path in tmp_path.iterdir()} == expected
