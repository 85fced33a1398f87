"""Streams that keep their ends: whoever is to read one closes it.

hivemind's daemon (go-libp2p-daemon, ``stream.go:doStreamPipe``) closes a stream for reading before it does for writing,
and resets it if its other half notices that in between. The peer at the other end then drops what it has not handed on
yet: about one stream in a thousand that the answering side closes lacks its end. A peer in a round of averaging then
keeps its own values of some parameters, one that was let into a group does not learn that, and a newcomer gets a part
of the state.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from hivemind.proto import averaging_pb2
from hivemind.utils.asyncio import attach_event_on_finished

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
