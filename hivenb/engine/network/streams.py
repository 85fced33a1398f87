"""Parts of tensors that a peer sends to another one, and the averages that come back, dealt out to several streams.

What is under way in one stream, not yet confirmed, is bounded by libp2p (yamux: 256 KiB, more only while confirmations
are quick). On a line that is busy in both directions, confirmations take several times as long as on an idle one, and
one stream carries half of what the line could. Several that get parts in turn carry nearly all.

To hivemind's all-reduce they are one stream, on both sides.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from hivemind.proto import averaging_pb2
from hivemind.utils.asyncio import attach_event_on_finished

# -- stream ends -----------------------------------------------------------------------------------------------------
#
# Streams that keep their ends: whoever is to read one closes it.
#
# hivemind's daemon (go-libp2p-daemon, ``stream.go:doStreamPipe``) closes a stream for reading before it does for
# writing, and resets it if its other half notices that in between. The peer at the other end then drops what it has
# not handed on yet: about one stream in a thousand that the answering side closes lacks its end. A peer in a round of
# averaging then keeps its own values of some parameters, one that was let into a group does not learn that, and a
# newcomer gets a part of the state.


Message = TypeVar("Message")
Call = Callable[[Any], Awaitable[AsyncGenerator[Any, None]]]

#: Seconds after which a stream is closed that whoever has asked should have closed.
CLOSED_WITHIN = 10.0

#: Seconds for which one is left open to somebody who may be of plain hivemind, and wait for its end: after parts of
#: tensors, for which its round waits, and after a state, which it gives up after its ``next_chunk_timeout``.
PARTS_LEFT_OPEN, STATE_LEFT_OPEN = 0.05, 0.5

#: What ours send after a state; it adds nothing to a state that a peer of plain hivemind puts together.
END_OF_STATE = averaging_pb2.DownloadData()


async def left_open(
    responses: AsyncIterable[Message], seconds: float, is_whole: Callable[[Message], bool]
) -> AsyncIterator[Message]:
    """Answer a request, and leave it to whoever has asked to close the stream.

    :param responses: the answer
    :param seconds: after which it is closed anyway
    :param is_whole: whether an answer that ends with that message is what was asked for. The stream is closed at once
      after a refusal: hivemind would otherwise not see that the other side has closed it, as long as that has sent
      what nobody reads
    """
    last = None
    async for response in responses:
        last = response
        yield response
    if last is not None and is_whole(last):
        await asyncio.sleep(seconds)  # which ends with a CancelledError as soon as the other side closes the stream


def is_end_of_state(message: averaging_pb2.DownloadData) -> bool:
    """Whether nothing is to come after it."""
    return message == END_OF_STATE


async def with_end(state: AsyncIterable[Any]) -> AsyncIterator[Any]:
    """A state, and after it a message that says so; nothing after nothing."""
    message = None
    async for message in state:
        yield message
    if message is not None:
        yield END_OF_STATE


async def closed_after(
    responses: AsyncGenerator[Message, None], is_last: Callable[[Message], bool], sent: asyncio.Event | None = None
) -> AsyncIterator[Message]:
    """Read an answer, and close the stream.

    :param responses: the stream
    :param is_last: whether nothing is to come after a message
    :param sent: is set when all of the request was sent; not closed before that
    """
    async with contextlib.aclosing(responses):
        async for response in responses:
            yield response
            if is_last(response):
                break
        if sent is not None:
            await sent.wait()


async def download_state(call: Call, request: averaging_pb2.DownloadRequest) -> AsyncIterator[Any]:
    """Ask for a state.

    :param call: the method of hivemind's stub
    :return: the messages of the state; of a peer of ours, :data:`END_OF_STATE` is the last one
    """
    return closed_after(await call(request), is_end_of_state)


async def aggregate_parts(call: Call, count: int, parts: AsyncGenerator[Any, None]) -> AsyncIterator[Any]:
    """Have parts of tensors averaged.

    :param call: the method of hivemind's stub
    :param count: how many parts are sent, and as many averages come back
    :param parts: messages with one part each; closed if nobody takes the rest of them
    :return: messages with the averages, in the order of the parts; fewer if whoever averages them is gone
    """
    sent, numbers = asyncio.Event(), itertools.count(1)
    requests = attach_event_on_finished(parts, sent)
    responses = await call(requests)

    async def first_response() -> list[Any]:
        try:
            return [await anext(responses)]
        except Exception as e:
            # whoever is to take the parts is gone, and hivemind waits until a client has sent them all
            with contextlib.suppress(RuntimeError):  # they are read at present, by a task that was cancelled
                await requests.aclose()
                await parts.aclose()
            sent.set()
            if isinstance(e, StopAsyncIteration):
                return []
            raise

    first = asyncio.ensure_future(first_response())
    first.add_done_callback(lambda done: done.cancelled() or done.exception())  # for nobody may ask for it
    return closed_after(_continued(first, responses), lambda _: next(numbers) == count, sent)


async def _continued(
    first: Awaitable[list[Message]], rest: AsyncGenerator[Message, None]
) -> AsyncGenerator[Message, None]:
    async with contextlib.aclosing(rest):
        for message in await first:
            yield message
        async for message in rest:
            yield message


# -- several streams -------------------------------------------------------------------------------------------------


#: How many streams a peer opens to another one, and answers as one, at most.
STREAMS = 4

#: Parts for each of them at least, and bytes before any codec: one takes some milliseconds to open, which small tensors
#: do not earn back however many there are.
PARTS_EACH, BYTES_EACH = 2, 1 << 18

#: Averages that wait to be sent, of each stream: who sends slowly is to receive as fast as it can.
_ANSWERS_WAITING = 2

#: Streams from a group to one of its peers at most: each is unproven until a part comes through it.
MOST_OF_GROUP = 128

_END = object()

Answer = Callable[[AsyncIterator[Any]], AsyncIterator[Any]]


def streams_for(count: int, size: int, peers: int) -> int:
    """How many streams suit so many parts.

    :param size: of all parts together, in bytes before any codec
    :param peers: in the group, of which each has so many to each other one
    """
    return max(1, min(STREAMS, count // PARTS_EACH, size // BYTES_EACH, MOST_OF_GROUP // peers))


def place_of(message: averaging_pb2.AveragingData) -> tuple[int, int]:
    """Which one it is of how many streams that begins with a message; ``(0, 1)`` for hivemind's only one.

    That is told where the message has room for the id of a peer, which nobody tells.
    """
    if len(message.peer_id) != 2:
        return 0, 1
    number, count = message.peer_id
    return (number, count) if number < count <= STREAMS else (0, 1)


async def aggregate_in_streams(
    call: Call, count: int, parts: AsyncGenerator[Any, None], streams: int
) -> AsyncIterator[Any]:
    """As :func:`hivenb.engine.network.streams.aggregate_parts`, over so many streams.

    :param streams: to a peer that may know of none but the only one: 1
    """
    if streams == 1:
        return await aggregate_parts(call, count, parts)
    shares = [len(range(number, count, streams)) for number in range(streams)]
    dealt = [_Channel(1) for _ in range(streams)]
    dealing = asyncio.create_task(_deal(parts, dealt))
    opening = [aggregate_parts(call, share, aiter(own)) for share, own in zip(shares, dealt, strict=True)]
    try:
        opened = await asyncio.gather(*opening, return_exceptions=True)
    except asyncio.CancelledError:
        dealing.cancel()
        raise
    failures = [one for one in opened if isinstance(one, BaseException)]
    answers: list[Any] = [one for one in opened if not isinstance(one, BaseException)]
    if failures:
        await _give_up(dealing, answers)
        raise failures[0]
    return _in_turn(answers, count, dealing)


class JoinedStreams:
    """The streams of one sender, answered as one.

    :param count: how many they are
    :param answer: gives the answers to all parts
    """

    def __init__(self, count: int, answer: Answer):
        self._parts = [_Channel(1) for _ in range(count)]
        self._answers = [_Channel(_ANSWERS_WAITING) for _ in range(count)]
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self._to_answer = [0] * count
        self._answering = asyncio.create_task(self._answer(answer))

    def expects(self, number: int, count: int) -> bool:
        """Whether a stream is one of these that is still to come."""
        return count == len(self._parts) and number not in self._begun

    def is_whole(self, number: int, last: averaging_pb2.AveragingData) -> bool:
        """Whether what was answered on one stream is all that was asked for.

        :param last: the last answer
        """
        return last.code == averaging_pb2.AVERAGED_PART and self._is_answered(number)

    async def serve(self, number: int, stream: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """The answers to the parts of one stream. If that is given up by whoever has opened it, all are."""
        self._begun.add(number)
        reading = asyncio.create_task(self._read(number, stream))
        try:
            async for answer in self._answers[number]:
                self._to_answer[number] -= 1
                yield answer
                if self._is_answered(number):
                    break
        finally:
            reading.cancel()
            if not self._is_answered(number):
                self._answering.cancel()

    def _is_answered(self, number: int) -> bool:
        return number in self._ended and self._to_answer[number] == 0

    async def _read(self, number: int, stream: AsyncIterator[Any]) -> None:
        try:
            async for part in stream:
                self._to_answer[number] += 1
                await self._parts[number].put(part)
        finally:
            self._ended.add(number)
            self._parts[number].close()
            if self._is_answered(number):
                self._answers[number].close()

    async def _answer(self, answer: Answer) -> None:
        turns = itertools.cycle(self._answers)
        try:
            async for message in answer(self._in_turn()):
                await next(turns).put(message)
        finally:
            for answers in self._answers:
                answers.close()

    async def _in_turn(self) -> AsyncIterator[Any]:
        readers = [aiter(parts) for parts in self._parts]
        for reader in itertools.cycle(readers):
            part = await anext(reader, _END)
            if part is _END:
                for other in readers:  # none is whole before it has come to its end
                    await anext(other, _END)
                return
            yield part


class _Channel:
    """What one task hands to another one.

    :param limit: how many things wait in it before whoever puts one more in has to
    """

    def __init__(self, limit: int):
        self._items: asyncio.Queue[Any] = asyncio.Queue()
        self._room = asyncio.Semaphore(limit)

    async def put(self, item: Any) -> None:
        await self._room.acquire()
        self._items.put_nowait(item)

    def close(self) -> None:
        """Nothing more is to come."""
        self._items.put_nowait(_END)

    async def __aiter__(self) -> AsyncGenerator[Any, None]:
        while (item := await self._items.get()) is not _END:
            self._room.release()
            yield item


async def _deal(parts: AsyncGenerator[Any, None], dealt: Sequence[_Channel]) -> None:
    numbers, first = itertools.count(), None
    try:
        async with contextlib.aclosing(parts):
            async for part in parts:
                first, number = first or part, next(numbers)
                if number < len(dealt):  # each stream begins as the only one would
                    part.code, part.group_id = first.code, first.group_id
                    part.peer_id = bytes((number, len(dealt)))
                await dealt[number % len(dealt)].put(part)
    finally:
        for own in dealt:
            own.close()


async def _in_turn(answers: Sequence[Any], count: int, dealing: asyncio.Task[None]) -> AsyncIterator[Any]:
    try:
        for number in range(count):
            answer = await anext(answers[number % len(answers)], _END)
            if answer is _END:
                if dealing.done():
                    dealing.result()  # they could not be sent, maybe
                return
            yield answer
        await dealing
        for stream in answers:  # each closes itself once all was sent
            async for _ in stream:
                pass
    finally:
        await _give_up(dealing, answers)


async def _give_up(dealing: asyncio.Task[None], answers: Sequence[Any]) -> None:
    dealing.cancel()
    await asyncio.gather(*map(_close, answers))


async def _close(stream: AsyncGenerator[Any, None]) -> None:
    # what was never read would not close what it reads: it is begun with
    reading = asyncio.ensure_future(anext(stream, None))
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait({reading})
    await stream.aclose()
