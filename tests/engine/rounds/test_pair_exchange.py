"""Two peers send each other all that they have: neither waits for an answer, and nothing changes before it was sent."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind tells a stream by typing's own class

import pytest
import torch
from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.control import AveragingStage
from hivemind.proto import averaging_pb2
from hivemind.utils import MSGPackSerializer

from hivenb.engine.averagers.gradient_averagers import GradientAverager
from hivenb.engine.dht.dht import DHT
from hivenb.engine.process.child_process import shared_locks_held
from hivenb.engine.rounds.fault_tolerant_runner import FaultTolerantRunner
from hivenb.engine.rounds.gathered import has_helper
from hivenb.engine.rounds.pair_exchange import MOST_NUMBERS, PairExchange, is_pair

#: Of a tensor that is sent in several parts, over several streams.
SEVERAL_PARTS = 1_000_000

MEETING = {"min_matchmaking_time": 5.0, "request_timeout": 2.0, "next_chunk_timeout": 300.0, "allreduce_timeout": 600.0}


@pytest.mark.parametrize(
    ("fractions", "sizes", "are_of_ours", "expected"),
    [
        ((0.5, 0.5), [3], True, True),
        ((0.9, 0.1), [3, 5], True, True),
        ((0.5, 0.5), [3], False, False),
        ((1.0, 0.0), [3], True, False),
        ((0.4, 0.3, 0.3), [3], True, False),
        ((1.0,), [3], True, False),
        ((0.5, 0.5), [3, 0], True, False),
        ((0.5, 0.5), [MOST_NUMBERS - 3, 3], True, True),
        ((0.5, 0.5), [MOST_NUMBERS, 1], True, False),
    ],
    ids=[
        "a pair",
        "uneven lines",
        "a plain peer",
        "a client",
        "three",
        "alone",
        "a tensor without numbers",
        "large",
        "too large",
    ],
)
def test_who_is_a_pair(fractions: Sequence[float], sizes: Sequence[int], are_of_ours: bool, expected: bool) -> None:
    assert is_pair(fractions, [torch.zeros(size) for size in sizes], are_of_ours) is expected


class SlowExchange(PairExchange):
    """Has the other one's numbers long before it has sent its own."""

    async def _generate_input_for_peer(self, peer_index: int) -> AsyncIterator[averaging_pb2.AveragingData]:
        async for message in super()._generate_input_for_peer(peer_index):
            yield message
            await asyncio.sleep(0.1)


class SlowSender(GradientAverager):
    """On a line that is slow in one direction."""

    def _runner_of(self, *args: Any) -> FaultTolerantRunner:
        runner = super()._runner_of(*args)
        assert type(runner) is PairExchange
        runner.__class__ = SlowExchange
        return runner


class Nonsense(GradientAverager):
    """Sends what cannot be averaged."""

    async def _run_allreduce_inplace_(self, tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        for tensor in tensors:
            tensor.fill_(math.nan)
        await super()._run_allreduce_inplace_(tensors, *args, **kwargs)


Meet = Callable[..., list[GradientAverager]]


@pytest.fixture
def meet(
    dht: DHT,
    joining_dht: DHT,
    make_averager: Callable[..., GradientAverager],
    expect_each_other: Callable[..., None],
) -> Meet:
    """Two averagers of such kinds, with gradients of 1 and of 2."""

    def make(*kinds: type[GradientAverager], size: int = 3) -> list[GradientAverager]:
        made = [make_averager(own, size, kind, **MEETING) for own, kind in zip((dht, joining_dht), kinds, strict=True)]
        expect_each_other(*made, epoch=1)
        for value, averager in enumerate(made, start=1):
            averager.parameters[0].grad = torch.full((size,), float(value))
            averager.accumulate_grads_(1)
        return made

    return make


def average(averagers: Sequence[GradientAverager]) -> list[Any]:
    """Whom each of them has had in its group."""
    controls = [averager.step(gather=1, timeout=60.0, wait=False) for averager in averagers]
    return [control.result(60) for control in controls]


def has(averager: GradientAverager) -> torch.Tensor:
    with averager.get_tensors() as (gradient,):
        return gradient.clone()


@pytest.mark.process
class TestTwoPeers:
    def test_neither_needs_an_answer(self, meet: Meet, silent: type[GradientAverager]) -> None:
        averagers = meet(silent, silent)
        both = {averager.peer_id for averager in averagers}
        assert [set(group) for group in average(averagers)] == [both, both]
        assert [has(averager).tolist() for averager in averagers] == [[1.5] * 3] * 2

    def test_what_is_still_to_be_sent_is_not_changed_before(self, meet: Meet) -> None:
        averagers = meet(SlowSender, GradientAverager, size=SEVERAL_PARTS)
        assert [len(group) for group in average(averagers)] == [2, 2]
        for averager in averagers:
            assert torch.equal(has(averager), torch.full((SEVERAL_PARTS,), 1.5))

    def test_numbers_that_are_none_are_refused_by_both(self, meet: Meet) -> None:
        averagers = meet(Nonsense, GradientAverager)
        groups = average(averagers)
        assert groups[1].refused.keys() == {averagers[0].peer_id}
        assert bool(has(averagers[0]).isnan().all())
        assert has(averagers[1]).tolist() == [2.0] * 3

    def test_one_that_dies_while_it_sends(self, meet: Meet, eventually: Callable[..., None]) -> None:
        living, dying = averagers = meet(GradientAverager, SlowSender, size=SEVERAL_PARTS)
        controls = [averager.step(gather=1, timeout=60.0, wait=False) for averager in averagers]
        eventually(lambda: controls[1].stage is AveragingStage.RUNNING_ALLREDUCE, 60)
        with shared_locks_held():
            for process in (dying, dying.dht):
                os.kill(process.pid, signal.SIGKILL)
        assert controls[0].result(60).keys() == {living.peer_id}
        assert set(has(living).tolist()) <= {1.0, 1.5}
        controls[1].cancel()


@pytest.mark.parametrize(("mode", "expected"), [(AveragingMode.NODE, False), (AveragingMode.AUX, True)])
def test_a_helper_is_known_by_what_it_says_to_its_group(mode: AveragingMode, expected: bool) -> None:
    said = [MSGPackSerializer.dumps([1.0, one.value, b""]) for one in (AveragingMode.NODE, mode)]
    assert has_helper(said) is expected
