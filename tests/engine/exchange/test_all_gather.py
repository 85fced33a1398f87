"""Peers send each other all they have: nobody waits for an answer, and nothing changes before it was sent to all."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind tells a stream by typing's own class

import pytest
import torch
from fuzzing.averager_without_process import EVIL, GOOD, OWN, anew, gathered, run, runner_of, step
from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.control import AveragingStage
from hivemind.averaging.group_info import GroupInfo
from hivemind.proto import averaging_pb2

from hivenb.engine.averaging.gradient_averager import GradientAverager
from hivenb.engine.exchange.all_reduce import RoundTerms
from hivenb.engine.exchange.runner import MOST_NUMBERS, MOST_ON_TOP, AllGather, FaultTolerantRunner, suits_all_gather
from hivenb.engine.network.dht import DHT
from hivenb.engine.process.child import shared_locks_held

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
        ((1.0,), [3], True, False),
        ((0.5, 0.5), [3, 0], True, False),
        ((0.5, 0.5), [MOST_NUMBERS - 3, 3], True, True),
        ((0.5, 0.5), [MOST_NUMBERS, 1], True, False),
        ((0.4, 0.3, 0.3), [3, 5], True, True),
        ((0.5, 0.5, 0.0), [3], True, False),
        ((0.25,) * 4, [MOST_ON_TOP * 2 // 3], True, True),
        ((0.25,) * 4, [MOST_ON_TOP * 2 // 3 + 1], True, False),
    ],
    ids=[
        "a pair",
        "uneven lines",
        "a plain peer",
        "a client",
        "alone",
        "a tensor without numbers",
        "large",
        "too large",
        "three",
        "three with a client",
        "four",
        "too large for four",
    ],
)
def test_which_group_does_so(
    fractions: Sequence[float], sizes: Sequence[int], are_of_ours: bool, expected: bool
) -> None:
    assert suits_all_gather(fractions, [torch.zeros(size) for size in sizes], are_of_ours) is expected


class SlowExchange(AllGather):
    """Has the others' numbers long before it has sent its own."""

    async def _generate_input_for_peer(self, peer_index: int) -> AsyncIterator[averaging_pb2.AveragingData]:
        async for message in super()._generate_input_for_peer(peer_index):
            yield message
            await asyncio.sleep(0.1)


class SlowSender(GradientAverager):
    """On a line that is slow in one direction."""

    def _runner_of(self, *args: Any, **settings: Any) -> FaultTolerantRunner:
        runner = super()._runner_of(*args, **settings)
        assert type(runner) is AllGather
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
    third_dht: DHT,
    make_averager: Callable[..., GradientAverager],
    expect_each_other: Callable[..., None],
) -> Meet:
    """Two or three averagers of such kinds, with gradients of 1, 2 and 3."""
    dhts = dht, joining_dht, third_dht

    def make(*kinds: type[GradientAverager], size: int = 3, **options: Any) -> list[GradientAverager]:
        options |= MEETING
        made = [make_averager(own, size, kind, **options) for own, kind in zip(dhts, kinds, strict=False)]
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


async def _average_without_one_who_has_left() -> list[float]:
    own = anew()
    group = GroupInfo(b"group", (EVIL, OWN, GOOD), (gathered(), gathered(), gathered()))
    own._matchmaking.step_control = step()
    own._matchmaking._await_trigger(group)
    tensor = torch.ones(3)
    settings: dict[str, Any] = {"part_size_bytes": 128, "peer_fractions": (0.3, 0.3, 0.4)}
    with own._register_allreduce_group(group):
        runner = runner_of(own, group, [tensor], are_of_ours=True, **settings)
        assert type(runner) is AllGather
        for peer in (EVIL, GOOD):
            runner._left_out.add(peer)
            await runner._ban_sender(peer)
        await asyncio.wait_for(runner.average_into([tensor], 1.0), 30.0)
        await runner._ending
    return tensor.tolist()


def test_nobody_waits_to_send_to_those_who_have_left_before() -> None:
    assert run(_average_without_one_who_has_left()) == [1.0] * 3


#: Of tensors that three peers still exchange like this, sent in several parts.
FOR_THREE = 49_000
IN_SMALL_PARTS = {"part_size_bytes": 1 << 14}


@pytest.mark.process
class TestThreePeers:
    def test_none_of_them_needs_an_answer(self, meet: Meet, silent: type[GradientAverager]) -> None:
        averagers = meet(silent, silent, silent)
        everyone = {averager.peer_id for averager in averagers}
        assert [set(group) for group in average(averagers)] == [everyone] * 3
        assert [has(averager).tolist() for averager in averagers] == [[2.0] * 3] * 3

    def test_what_is_still_to_be_sent_is_not_changed_before(self, meet: Meet) -> None:
        averagers = meet(SlowSender, GradientAverager, GradientAverager, size=FOR_THREE, **IN_SMALL_PARTS)
        assert [len(group) for group in average(averagers)] == [3, 3, 3]
        for averager in averagers:
            assert torch.equal(has(averager), torch.full((FOR_THREE,), 2.0))

    def test_numbers_that_are_none_are_refused_by_all(self, meet: Meet) -> None:
        averagers = meet(Nonsense, GradientAverager, GradientAverager)
        groups = average(averagers)
        for number in (1, 2):
            assert groups[number].refused.keys() == {averagers[0].peer_id}
            assert has(averagers[number]).tolist() == [2.5] * 3
        assert bool(has(averagers[0]).isnan().all())

    def test_one_that_dies_before_it_sends_leaves_the_others_their_average(
        self, meet: Meet, eventually: Callable[..., None]
    ) -> None:
        *living, dying = averagers = meet(GradientAverager, GradientAverager, GradientAverager)
        controls = [averager.schedule_step(gather=1, timeout=120.0) for averager in averagers]
        eventually(lambda: all(control.stage is AveragingStage.AWAITING_TRIGGER for control in controls), 60)
        for process in (dying, dying.dht):
            process.kill()
        for averager, control in zip(living, controls, strict=False):
            averager.load_accumulators_into_averager_()
            control.weight = 1.0
            control.allow_allreduce()
        for averager, control in zip(living, controls, strict=False):
            assert control.result(60).keys() == {one.peer_id for one in living}
            assert has(averager).tolist() == [1.5] * 3
        controls[2].cancel()


@pytest.mark.parametrize(("mode", "expected"), [(AveragingMode.NODE, False), (AveragingMode.AUX, True)])
def test_a_helper_is_known_by_what_it_says_to_its_group(mode: AveragingMode, expected: bool) -> None:
    terms = RoundTerms.of([[1.0, one.value, b""] for one in (AveragingMode.NODE, mode)])
    assert terms.has_helper is expected
