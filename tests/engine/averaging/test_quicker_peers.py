"""A peer that is quicker than another one of its group waits for that one's trigger; it is not turned away."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hivemind.averaging.control import AveragingStage
from in_memory.real_time import RealTimeDHT

from hivenb.engine.averaging.gradient_averager import GradientAverager


class EndsAnotherRound(GradientAverager):
    async def _end_another_round(self) -> None:
        """What the end of a round before does while the next one has a group already."""
        self._pending_groups_registered.set()


@pytest.fixture
def averagers(
    memory_dht: RealTimeDHT,
    joining_memory_dht: RealTimeDHT,
    make_averager: Callable[..., GradientAverager],
    expect_each_other: Callable[..., None],
) -> list[GradientAverager]:
    timeouts = {"min_matchmaking_time": 5.0, "request_timeout": 2.0, "next_chunk_timeout": 60.0}
    made = [make_averager(own, 1000, EndsAnotherRound, **timeouts) for own in (memory_dht, joining_memory_dht)]
    expect_each_other(*made, epoch=1)
    return made


@pytest.mark.parametrize("quicker", [0, 1])
def test_it_waits_for_the_others_trigger(
    averagers: list[GradientAverager], quicker: int, eventually: Callable[..., None]
) -> None:
    controls = [averager.schedule_step(gather=1, timeout=60.0) for averager in averagers]
    eventually(lambda: all(control.stage is AveragingStage.AWAITING_TRIGGER for control in controls), 60)
    for value, averager in enumerate(averagers, start=1):
        averager._outer_pipe.send(("_end_another_round", [], {}))
        with averager.get_tensors() as (gradient,):
            gradient.fill_(value)
    first, second = controls[quicker], controls[1 - quicker]
    for control in controls:
        control.weight = 1.0
    first.allow_allreduce()
    eventually(lambda: first.stage is AveragingStage.RUNNING_ALLREDUCE)
    assert not first.done()
    second.allow_allreduce()
    for control, averager in zip(controls, averagers, strict=True):
        assert len(control.result(30)) == 2
        with averager.get_tensors() as (gradient,):
            assert torch.equal(gradient, torch.full_like(gradient, 1.5)), "parts of it were turned away"
