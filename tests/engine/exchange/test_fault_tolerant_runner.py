"""What a sender opens streams for: its parts count once, however often it sends them."""

from __future__ import annotations

import asyncio
import contextlib
from itertools import chain
from typing import Any

import pytest
import torch
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
from hivemind.averaging.group_info import GroupInfo
from hivemind.compression import serialize_torch_tensor
from hivemind.proto import averaging_pb2

from hivenb.engine.exchange.runner import FaultTolerantRunner

GROUP = b"the group of this test"

VIOLATION, AVERAGE = averaging_pb2.PROTOCOL_VIOLATION, averaging_pb2.AVERAGED_PART

#: Parts of each, of ten numbers; this peer's own are 1.
PARTS = 3


def runner_for_three(own: Any) -> tuple[FaultTolerantRunner, torch.Tensor]:
    """One who averages for a good peer and an evil one, and the numbers that become the average."""
    group = GroupInfo(GROUP, (OWN, GOOD, EVIL), tuple(gathered() for _ in range(3)))
    own._matchmaking.step_control = step()
    own._matchmaking._await_trigger(group)
    own._matchmaking.begin(GROUP)
    tensor = torch.ones(PARTS * 10)
    settings: dict[str, Any] = {
        "part_size_bytes": 40,
        "peer_fractions": (1.0, 0.0, 0.0),
        "sender_timeout": 10.0,
        "reducer_timeout": 15.0,
    }
    return runner_of(own, group, [tensor], **settings), tensor


def part(value: float, place: tuple[int, ...] = ()) -> averaging_pb2.AveragingData:
    """A part, as the first one of a stream, that is one of several if it has a place."""
    message = averaging_pb2.AveragingData(code=averaging_pb2.PART_FOR_AVERAGING, group_id=GROUP, weight=1.0)
    message.tensor_part.CopyFrom(serialize_torch_tensor(torch.full((10,), value)))
    message.peer_id = bytes(place)
    return message


def plain(value: float) -> list[averaging_pb2.AveragingData]:
    """All parts, as the only stream has them."""
    return [part(value) for _ in range(PARTS)]


def joined(value: float) -> list[list[averaging_pb2.AveragingData]]:
    """All parts, dealt out to two streams."""
    return [[part(value, (0, 2)), part(value)], [part(value, (1, 2))]]


async def exchange(evil: list[list[averaging_pb2.AveragingData]]) -> tuple[list[Any], torch.Tensor, Any]:
    """The evil one opens streams, then the good one its own.

    :returns: the codes that each stream of the evil one was answered with, the average, and who was refused
    """
    runner, tensor = runner_for_three(anew())

    async def ask(peer: Any, sent: list[averaging_pb2.AveragingData]) -> list[int]:
        return [answer.code for answer in await all_of(runner.rpc_aggregate_part(stream(sent), context(peer)))]

    averaging = asyncio.create_task(runner.average_into([tensor], 1.0))
    asking = [asyncio.create_task(ask(EVIL, sent)) for sent in evil]
    await asyncio.wait(asking, timeout=0.2)  # what was taken of them waits for the good one's
    assert await ask(GOOD, plain(7.0)) == [AVERAGE] * PARTS
    await averaging
    answers = await asyncio.gather(*asking)
    with contextlib.suppress(AttributeError):
        await runner.ending
    return answers, tensor, runner.notes.refused


@pytest.mark.parametrize("streams", [[plain(-2.0)], joined(-2.0)], ids=["plain", "joined"])
def test_a_sender_that_sends_its_parts_once_is_served(streams: list[Any]) -> None:
    answers, average, refused = run(exchange(streams))
    assert list(chain(*answers)) == [AVERAGE] * PARTS
    assert average.tolist() == [2.0] * 10 * PARTS
    assert not refused


@pytest.mark.parametrize(
    ("first", "again"),
    [
        ([plain(-2.0)], [plain(-9.0)]),
        ([plain(-2.0)], joined(-9.0)),
        (joined(-2.0), [plain(-9.0)]),
        (joined(-2.0), joined(-9.0)),
    ],
    ids=["plain twice", "joined after plain", "plain after joined", "joined twice"],
)
def test_what_a_sender_sends_again_takes_nobodys_place(first: list[Any], again: list[Any]) -> None:
    answers, average, refused = run(exchange([*first, *again]))
    assert answers[len(first) :] == [[VIOLATION]] * len(again)
    assert list(chain(*answers[: len(first)])) == [AVERAGE] * PARTS
    assert average.tolist() == [2.0] * 10 * PARTS, "the good one's counts, and the first of the evil one"
    assert list(refused) == [EVIL]


def test_who_tries_anew_after_its_stream_broke_is_not_blamed() -> None:
    async def try_anew() -> None:
        runner, tensor = runner_for_three(anew())
        averaging = asyncio.create_task(runner.average_into([tensor], 1.0))
        broken = asyncio.ensure_future(anext(runner.rpc_aggregate_part(stream(plain(-2.0)), context(EVIL))))
        await asyncio.wait({broken}, timeout=0.2)
        broken.cancel()
        await asyncio.wait({broken})
        anew_sent = await all_of(runner.rpc_aggregate_part(stream(plain(-2.0)), context(EVIL)))
        assert [answer.code for answer in anew_sent] == [VIOLATION]
        await all_of(runner.rpc_aggregate_part(stream(plain(7.0)), context(GOOD)))
        await averaging
        assert tensor.tolist() == [2.0] * 10 + [4.0] * 10 * (PARTS - 1), "what came before it broke counts"
        assert not runner.notes.refused

    run(try_anew())
