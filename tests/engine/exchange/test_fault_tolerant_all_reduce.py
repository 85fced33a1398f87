"""A peer that dies in a group that has met costs the others no deadline, and whose average is lost is not counted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fuzzing.averager_without_process import GOOD, anew, context, run
from hivemind.averaging.control import AveragingStage
from hivemind.proto import averaging_pb2
from hivemind.utils.asyncio import as_aiter
from tiny import LOOPBACK

from hivenb.engine.averaging.gradient_averager import GradientAverager
from hivenb.engine.network.dht import DHT

#: Of averagers that would wait for a silent one for longer than any test lasts.
DEADLINES = {"request_timeout": 2.0, "next_chunk_timeout": 300.0, "allreduce_timeout": 600.0}


@pytest.fixture
def dhts(dht: DHT) -> Iterator[list[DHT]]:
    """Of three peers; a test may kill them."""
    with contextlib.ExitStack() as ended:
        made = []
        for _ in range(3):
            made.append(DHT(start=True, initial_peers=[str(a) for a in dht.get_visible_maddrs()], **LOOPBACK))
            ended.callback(made[-1].shutdown)
        yield made


@pytest.fixture
def averagers(
    dhts: list[DHT], make_averager: Callable[..., GradientAverager], expect_each_other: Callable[..., None]
) -> list[GradientAverager]:
    """Three that would wait for a silent one for longer than any test lasts."""
    made = [make_averager(own, min_matchmaking_time=5.0, **DEADLINES) for own in dhts]
    expect_each_other(*made, epoch=1)
    return made


@pytest.mark.usefixtures("shared_out")
def test_the_others_go_on_without_it(averagers: list[GradientAverager], eventually: Callable[..., None]) -> None:
    controls = _meet(averagers, eventually)
    *living, dead = averagers
    _kill(dead)
    for value, (averager, control) in enumerate(zip(living, controls, strict=False), start=1):
        _begin(averager, control, value)
    for control in controls[:2]:
        # whoever neither averages for the dead one nor gets anything from it does not know
        assert control.result(60).keys() >= {averager.peer_id for averager in living}
    controls[2].cancel()
    for averager in living:
        with averager.get_tensors() as (gradient,):
            # as small as it is, one peer averages all of it; where that was the dead one, it stays as it was
            assert sum(gradient.sub(1.5).abs() < 1e-6) in (0, 3)


def _meet(averagers: list[GradientAverager], eventually: Callable[..., None]) -> list[Any]:
    """Their rounds, in which they have a group and wait for their triggers."""
    controls = [averager.schedule_step(gather=1, timeout=120.0) for averager in averagers]
    eventually(lambda: all(control.stage is AveragingStage.AWAITING_TRIGGER for control in controls), 60)
    return controls


def _kill(averager: GradientAverager) -> None:
    for process in (averager, averager.dht):
        process.kill()


def _begin(averager: GradientAverager, control: Any, value: float) -> None:
    with averager.get_tensors() as (gradient,):
        gradient.fill_(value)
    averager.local_samples_accumulated = 1
    control.weight = 1.0
    control.allow_allreduce()


def test_a_sender_that_dies_before_a_round_begins_leaves_it_to_the_others() -> None:
    """With PowerSGD, the second half of a round waits for the first one with some data of the others at hand."""

    async def be_sent_a_part() -> None:
        averager = anew()
        group: asyncio.Future[Any] = asyncio.Future()
        averager._running_groups[b"group"] = group
        parts = as_aiter(averaging_pb2.AveragingData(group_id=b"group"))
        asking = asyncio.ensure_future(anext(averager.rpc_aggregate_part(parts, context(GOOD))))
        await asyncio.wait({asking}, timeout=0.1)
        asking.cancel()
        await asyncio.wait({asking})
        assert asking.cancelled()
        assert not group.cancelled()

    run(be_sent_a_part())
