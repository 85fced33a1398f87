"""A peer that ends as soon as its round is over gives the others what they still are to have of it."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind tells a stream by typing's own class

import psutil
import pytest
import torch
from hivemind.averaging.control import AveragingStage

from hivenb.engine.averaging.gradient_averager import GradientAverager
from hivenb.engine.exchange.all_gather import AllGather
from hivenb.engine.exchange.part_messages import PartMessage
from hivenb.engine.exchange.runner import FaultTolerantRunner
from hivenb.engine.network.dht import DHT

pytestmark = pytest.mark.process

#: Of a tensor that two peers send in several parts, which lets both kinds of exchange be chosen.
NUMBERS = 1_000_000

#: Seconds by which each part comes late.
DELAY = 0.2

MEETING = {"min_matchmaking_time": 5.0, "request_timeout": 2.0, "next_chunk_timeout": 60.0, "allreduce_timeout": 60.0}


class LateCopies(AllGather):
    """Has the other one's numbers long before its own are sent."""

    async def _copies_for(self, peer_id: Any) -> AsyncIterator[PartMessage]:
        async for message in super()._copies_for(peer_id):
            await asyncio.sleep(DELAY)
            yield message


class LateAnswers(FaultTolerantRunner):
    """Has its averages from the other one long before it gives its own."""

    async def _answer(self, *args: Any) -> PartMessage:
        await asyncio.sleep(DELAY)
        return await super()._answer(*args)


class LateSender(GradientAverager):
    """One of two peers whose line is slow in one direction."""

    def _runner_of(self, *args: Any, **settings: Any) -> FaultTolerantRunner:
        runner = super()._runner_of(*args, **settings)
        runner.__class__ = LateCopies if type(runner) is AllGather else LateAnswers
        return runner


def meet(first: GradientAverager, second: GradientAverager, expect_each_other: Callable[..., None]) -> tuple[Any, Any]:
    expect_each_other(first, second, epoch=1)
    for value, averager in ((1.0, first), (2.0, second)):
        averager.parameters[0].grad = torch.full((NUMBERS,), value)
        averager.accumulate_grads_(1)
    return first.step(gather=1, timeout=60.0, wait=False), second.step(gather=1, timeout=60.0, wait=False)


@pytest.mark.parametrize(
    "is_shared_out", [False, True], ids=["all that it has is sent", "what it averages is answered"]
)
def test_a_peer_that_ends_gives_the_rest(
    dht: DHT,
    joining_dht: DHT,
    make_averager: Callable[..., GradientAverager],
    expect_each_other: Callable[..., None],
    is_shared_out: bool,
    request: pytest.FixtureRequest,
) -> None:
    if is_shared_out:
        request.getfixturevalue("shared_out")
    staying = make_averager(dht, NUMBERS, **MEETING)
    leaving = make_averager(joining_dht, NUMBERS, LateSender, **MEETING)
    stays, leaves = meet(staying, leaving, expect_each_other)
    assert len(leaves.result(60)) == 2
    leaving.shutdown()
    assert len(stays.result(60)) == 2
    with staying.get_tensors() as (average,):
        assert set(average.tolist()) == {1.5}


def test_one_that_hangs_keeps_nobody_from_ending(
    dht: DHT,
    third_dht: DHT,
    make_averager: Callable[..., GradientAverager],
    expect_each_other: Callable[..., None],
    eventually: Callable[..., None],
    shared_out: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hanging = make_averager(third_dht, NUMBERS, **MEETING)
    leaving = make_averager(dht, NUMBERS, LateSender, **MEETING)
    hangs, leaves = meet(hanging, leaving, expect_each_other)
    assert len(leaves.result(60)) == 2
    assert hangs.stage is AveragingStage.RUNNING_ALLREDUCE
    stopped = [psutil.Process(one.pid) for one in (hanging, third_dht)]
    stopped += [child for one in stopped for child in one.children(recursive=True)]
    for one in stopped:
        one.send_signal(signal.SIGSTOP)
    try:
        with caplog.at_level(logging.WARNING):
            leaving.shutdown()
        assert not leaving.is_alive()
        assert not [one for one in caplog.records if "by force" in one.getMessage()]
    finally:
        for one in stopped:
            one.send_signal(signal.SIGCONT)
    eventually(hangs.done, 60)
