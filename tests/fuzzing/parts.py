"""Parts of gradients that a member of a group sends to be averaged, and what it gives back as averages."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from google.protobuf.message import DecodeError
from hivemind.averaging.group_info import GroupInfo
from hivemind.compression import serialize_torch_tensor
from hivemind.proto import averaging_pb2

from fuzzing.averager_without_process import (
    EVIL,
    GOOD,
    OWN,
    all_of,
    anew,
    context,
    gathered,
    run,
    runner_of,
    step,
    stream,
)
from fuzzing.target import Choices, Target
from fuzzing.tensors import made_of
from hivenb.engine.exchange.all_gather import AllGather
from hivenb.engine.exchange.part_messages import PartMessage
from hivenb.engine.network.streams import STREAMS

GROUP = b"group-of-this-input"

WEIGHTS = (1.0, 0.0, 64.0, 0.5, -1.0, 1e9, 1e308, float("inf"), float("nan"), 5e-324)
CODES = (averaging_pb2.PART_FOR_AVERAGING, averaging_pb2.NO_CODE, averaging_pb2.AVERAGED_PART, averaging_pb2.CANCELLED)
VALUES = (1.0, 0.0, float("nan"), float("inf"), 1e30, -1e38)


def a_part(choices: Choices, length: int, code: int) -> averaging_pb2.AveragingData:
    """A part as it should be, or with something that is wrong."""
    is_wrong = choices.now_and_then
    value = choices.of(VALUES) if is_wrong() else 1.0
    message = averaging_pb2.AveragingData(code=code, group_id=GROUP, weight=1.0)
    message.tensor_part.CopyFrom(serialize_torch_tensor(torch.full((length,), value)))
    if is_wrong():
        message.tensor_part.CopyFrom(made_of(choices))
    if is_wrong():
        shape = (choices.of((0, 1, 2, length, length + 1)), *([1] * choices.number(3)))
        message.tensor_part.CopyFrom(serialize_torch_tensor(torch.ones(shape)))
    if is_wrong():
        message.weight = choices.of(WEIGHTS)
    has_begun = not code or code == averaging_pb2.AVERAGED_PART  # who has not is waited for, as long as it may take
    if is_wrong() and has_begun:
        message.code = choices.of(CODES) if choices.number(2) else choices.number(30)
    if is_wrong() and has_begun:
        message.group_id = choices.of((b"", GROUP[:4], GROUP + b"x", b"another"))
    if is_wrong() and has_begun:
        with contextlib.suppress(DecodeError):
            message.ParseFromString(choices.raw(64) if choices.number(2) else b"")
    return message


def arriving(messages: Iterable[averaging_pb2.AveragingData]) -> AsyncIterator[PartMessage]:
    """Messages as they arrive."""

    def one(message: averaging_pb2.AveragingData) -> PartMessage:
        received = PartMessage()
        received.ParseFromString(message.SerializeToString())
        return received

    return stream(map(one, messages))


def dealt(choices: Choices, parts: list[Any], streams: int) -> list[list[Any]]:
    """Parts for several streams; if one were missing, the others would wait for it."""
    if streams == 1:
        return [parts]
    for number, part in enumerate(parts[:streams]):
        part.code, part.group_id = parts[0].code, parts[0].group_id
        part.peer_id = bytes((number, streams))
    return [parts[number::streams] for number in range(streams)]


async def _serve(choices: Choices) -> None:
    """Be the one who averages for a good peer and an evil one, as each of a group is for its part."""
    own = anew()
    group = GroupInfo(GROUP, (OWN, GOOD, EVIL), tuple(gathered() for _ in range(3)))
    current = step()
    own._matchmaking.step_control = current
    own._matchmaking._await_trigger(group)
    tensor = torch.ones(96)
    settings: dict[str, Any] = {
        "part_size_bytes": 128,
        "peer_fractions": (1.0, 0.0, 0.0),
        "sender_timeout": 30.0,
        "reducer_timeout": 60.0,
    }
    with own._register_allreduce_group(group):
        runner = runner_of(own, group, [tensor], **settings)
        own._running_groups[GROUP].set_result(runner)
        lengths = [len(part) for part in runner.parts_for_local_averaging]
        count = 1 + choices.number(1 + len(lengths)) if choices.now_and_then() else len(lengths)
        start = averaging_pb2.PART_FOR_AVERAGING
        evil = [a_part(choices, lengths[n % len(lengths)], 0 if n else start) for n in range(count)]
        nothing_wrong = Choices(b"")
        good = [a_part(nothing_wrong, length, 0 if n else start) for n, length in enumerate(lengths)]
        streams = 1 + choices.number(min(STREAMS, count)) if choices.now_and_then() else 1
        answering = [
            asyncio.create_task(_answered(own.rpc_aggregate_part(arriving(sent), context(peer))))
            for peer, sent in ((GOOD, good), *((EVIL, one) for one in dealt(choices, evil, streams)))
        ]
        await runner.average_into([tensor], 1.0)
        answers = await answering[0]
        for one in answering[1:]:
            one.cancel()  # the evil one goes away
        with contextlib.suppress(AttributeError):
            await runner.ending
    assert [answer.code for answer in answers] == [averaging_pb2.AVERAGED_PART] * len(lengths), "of the good one"
    assert tensor.isfinite().all(), "what became of this peer's own numbers"


async def _answered(answers: Any) -> list[Any]:
    try:
        return await all_of(answers)
    except (StopAsyncIteration, RuntimeError, ValueError):  # libp2p's handler tells whoever has sent that
        return []


def feed_parts(data: bytes) -> None:
    run(_serve(Choices(data)))


async def _send(choices: Choices) -> None:
    """Send parts to somebody who answers with anything."""
    own = anew()
    group = GroupInfo(GROUP, (EVIL, OWN), (gathered(), gathered()))
    tensor = torch.ones(96)
    settings: dict[str, Any] = {
        "part_size_bytes": 128,
        "peer_fractions": (1.0, 0.0),
        "sender_timeout": 30.0,
        "reducer_timeout": 60.0,
    }
    count = choices.number(5) if choices.now_and_then() else 3

    async def answer(parts: Any) -> Any:
        sent = [part async for part in parts]
        lengths = [len(part.tensor_part.buffer) // 4 for part in sent]
        replies = [a_part(choices, lengths[n % len(lengths)], averaging_pb2.AVERAGED_PART) for n in range(count)]
        return arriving(replies)

    stub = SimpleNamespace(rpc_aggregate_part=answer)
    with own._register_allreduce_group(group):
        runner = runner_of(own, group, [tensor], **settings)
        runner._servicer_type = SimpleNamespace(get_stub=lambda *args, **kwargs: stub)
        await runner.average_into([tensor], 1.0)
        with contextlib.suppress(AttributeError):
            await runner.ending
    assert tensor.isfinite().all(), "what became of this peer's own numbers"


def feed_averages(data: bytes) -> None:
    run(_send(Choices(data)))


async def _exchange(choices: Choices) -> None:
    """Be one of a pair, of which the other sends anything, and answers with anything."""
    own = anew()
    group = GroupInfo(GROUP, (EVIL, OWN), (gathered(), gathered()))
    own._matchmaking.step_control = step()
    own._matchmaking._await_trigger(group)
    tensor = torch.ones(96)
    settings: dict[str, Any] = {
        "part_size_bytes": 128,
        "peer_fractions": (0.5, 0.5),
        "sender_timeout": 30.0,
        "reducer_timeout": 60.0,
        "are_of_ours": True,
    }

    async def answer(parts: Any) -> Any:
        taken = [part async for part in parts]
        count = choices.number(2 + len(taken)) if choices.now_and_then() else len(taken)
        return arriving([a_part(choices, 32, averaging_pb2.AVERAGED_PART) for _ in range(count)])

    with own._register_allreduce_group(group):
        runner = runner_of(own, group, [tensor], **settings)
        assert type(runner) is AllGather
        runner._servicer_type = SimpleNamespace(
            get_stub=lambda *args, **kwargs: SimpleNamespace(rpc_aggregate_part=answer)
        )
        own._running_groups[GROUP].set_result(runner)
        count = 1 + choices.number(1 + len(runner.parts_for_local_averaging)) if choices.now_and_then() else 3
        start = averaging_pb2.PART_FOR_AVERAGING
        sent = [a_part(choices, 32, 0 if number else start) for number in range(count)]
        answering = asyncio.create_task(_answered(own.rpc_aggregate_part(arriving(sent), context(EVIL))))
        await runner.average_into([tensor], 1.0)
        answering.cancel()  # the evil one goes away
        await runner.ending
    assert tensor.isfinite().all(), "what became of this peer's own numbers"


def feed_pair(data: bytes) -> None:
    run(_exchange(Choices(data)))


def feed_part_bytes(data: bytes) -> None:
    """Read bytes as protobuf does, or refuse them as it does; and read again what was read, as hivenb would send it."""
    message, whole = PartMessage(), averaging_pb2.AveragingData()
    try:
        whole.ParseFromString(data)
    except DecodeError:
        try:
            message.ParseFromString(data)
        except DecodeError:
            return
        raise AssertionError("protobuf does not read that") from None
    message.ParseFromString(data)
    assert as_protobuf(message) == whole
    again = PartMessage()
    again.ParseFromString(message.SerializeToString())
    assert as_protobuf(again) == whole
    whole.ParseFromString(message.SerializeToString())
    assert as_protobuf(message) == whole


def as_protobuf(message: PartMessage) -> averaging_pb2.AveragingData:
    """The same as a message of protobuf; what has no numbers has none either."""
    whole = averaging_pb2.AveragingData()
    whole.CopyFrom(message.head)
    if message.tensor_part.buffer:
        whole.tensor_part.buffer = bytes(message.tensor_part.buffer)
    return whole


TARGETS = [
    Target("part-bytes", "the bytes of a message with a part, as protobuf reads them", feed_part_bytes),
    Target("parts", "parts that a member of the group sends to be averaged", feed_parts),
    Target("pair", "what the other one of a pair sends, and answers", feed_pair),
    Target("averages", "what a member of the group gives back as averages", feed_averages),
]
