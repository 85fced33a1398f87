"""Peers that send each other all they have: nobody waits for an answer, and nothing changes before it was sent."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from fuzzing.averager_without_process import EVIL, OWN, anew, gathered, run, runner_of, step
from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.control import AveragingStage
from hivemind.averaging.group_info import GroupInfo
from slow_sender import SlowSender

from hivenb.engine.averaging.gradient_averager import GradientAverager
from hivenb.engine.exchange.all_gather import MOST_NUMBERS, MOST_TO_ALL, AllGather, suits_all_gather
from hivenb.engine.exchange.all_reduce import RoundTerms
from hivenb.engine.network.dht import DHT
from hivenb.engine.process.child import shared_locks_held

#: Of a tensor that is sent in several parts, over several streams.
SEVERAL_PARTS = 1_000_000

MEETING = {"min_matchmaking_time": 5.0, "request_timeout": 2.0, "next_chunk_timeout": 300.0, "allreduce_timeout": 600.0}


@pytest.mark.parametrize(
    ("fractions", "sizes", "are_of_ours", "are_far", "expected"),
    [
        ((0.5, 0.5), [3], True, False, True),
        ((0.9, 0.1), [3, 5], True, False, True),
        ((0.5, 0.5), [3], False, False, False),
        ((1.0, 0.0), [3], True, False, False),
        ((1.0,), [3], True, False, False),
        ((0.5, 0.5), [3, 0], True, False, False),
        ((0.5, 0.5), [MOST_NUMBERS - 3, 3], True, False, True),
        ((0.5, 0.5), [MOST_NUMBERS, 1], True, True, False),
        ((0.4, 0.3, 0.3), [3, 5], True, False, False),
        ((0.4, 0.3, 0.3), [3, 5], True, True, True),
        ((0.4, 0.3, 0.3), [3, 5], False, True, False),
        ((0.5, 0.5, 0.0), [3, 5], True, True, False),
        ((0.4, 0.3, 0.3), [MOST_TO_ALL // 2], True, True, True),
        ((0.4, 0.3, 0.3), [MOST_TO_ALL // 2 + 1], True, True, False),
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
        "three, far",
        "three, far, one of plain hivemind",
        "three, far, one a client",
        "three, far, large",
        "three, far, too large",
    ],
)
def test_which_group_does_so(
    fractions: Sequence[float], sizes: Sequence[int], are_of_ours: bool, are_far: bool, expected: bool
) -> None:
    assert suits_all_gather(fractions, [torch.zeros(size) for size in sizes], are_of_ours, are_far) is expected


def has(averager: GradientAverager) -> torch.Tensor:
    with averager.get_tensors() as (gradient,):
        return gradient.clone()


@pytest.mark.process
def test_one_of_two_that_is_killed_while_it_sends_costs_the_other_one_no_deadline(
    dht: DHT,
    third_dht: DHT,
    make_averager: Callable[..., GradientAverager],
    expect_each_other: Callable[..., None],
    eventually: Callable[..., None],
) -> None:
    living = make_averager(dht, SEVERAL_PARTS, **MEETING)
    dying = make_averager(third_dht, SEVERAL_PARTS, SlowSender, **MEETING)
    expect_each_other(living, dying, epoch=1)
    for value, averager in ((1.0, living), (2.0, dying)):
        averager.parameters[0].grad = torch.full((SEVERAL_PARTS,), value)
        averager.accumulate_grads_(1)
    controls = [averager.step(gather=1, timeout=60.0, wait=False) for averager in (living, dying)]
    eventually(lambda: controls[1].stage is AveragingStage.RUNNING_ALLREDUCE, 60)
    with shared_locks_held():
        for process in (dying, dying.dht):
            os.kill(process.pid, signal.SIGKILL)
    assert controls[0].result(60).keys() == {living.peer_id}
    assert set(has(living).tolist()) <= {1.0, 1.5}
    controls[1].cancel()


async def _average_without_one_who_has_left() -> list[float]:
    own = anew()
    group = GroupInfo(b"group", (EVIL, OWN), (gathered(), gathered()))
    own._matchmaking.step_control = step()
    own._matchmaking._await_trigger(group)
    tensor = torch.ones(3)
    settings: dict[str, Any] = {"part_size_bytes": 128, "peer_fractions": (0.5, 0.5)}
    with own._register_allreduce_group(group):
        runner = runner_of(own, group, [tensor], are_of_ours=True, **settings)
        assert type(runner) is AllGather
        runner._excluded.add(EVIL)
        await runner._ban_sender(EVIL)
        await asyncio.wait_for(runner.average_into([tensor], 1.0), 30.0)
        await runner.ending
    return tensor.tolist()


def test_nobody_waits_to_send_to_one_who_has_left_before() -> None:
    assert run(_average_without_one_who_has_left()) == [1.0] * 3


@pytest.mark.parametrize(("mode", "expected"), [(AveragingMode.NODE, False), (AveragingMode.AUX, True)])
def test_a_helper_is_known_by_what_it_says_to_its_group(mode: AveragingMode, expected: bool) -> None:
    terms = RoundTerms.of([[1.0, one.value, b""] for one in (AveragingMode.NODE, mode)])
    assert terms.has_helper is expected
