"""A peer that dies in a group that has met costs the others no deadline."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

import pytest
from hivemind.averaging.control import AveragingStage
from tiny import LOOPBACK

from hivenb.engine.averagers import GradientAverager
from hivenb.engine.dht import DHT
from hivenb.engine.epoch_matchmaking import ExpectedPeers


@pytest.fixture
def dhts(dht: DHT) -> Iterator[list[DHT]]:
    """Of three peers; a test may kill them."""
    with contextlib.ExitStack() as ended:
        made = []
        for _ in range(3):
            made.append(DHT(start=True, initial_peers=[str(a) for a in dht.get_visible_maddrs()], **LOOPBACK))
            ended.callback(lambda own=made[-1]: own.is_alive() and own.shutdown())
        yield made


@pytest.fixture
def averagers(dhts: list[DHT], make_averager: Callable[..., GradientAverager]) -> list[GradientAverager]:
    """Three that would wait for a silent one for longer than any test lasts."""
    deadlines = {"request_timeout": 2.0, "next_chunk_timeout": 300.0, "allreduce_timeout": 600.0}
    made = [make_averager(own, min_matchmaking_time=5.0, **deadlines) for own in dhts]
    for averager in made:
        averager.expect_peers(ExpectedPeers((1, 1)))
    return made


def test_the_others_go_on_without_it(averagers: list[GradientAverager], eventually: Callable[..., None]) -> None:
    controls = [averager.schedule_step(gather=1, timeout=120.0) for averager in averagers]
    eventually(lambda: all(control.stage is AveragingStage.AWAITING_TRIGGER for control in controls), 60)
    *living, dead = averagers
    for victim in (dead, dead.dht):
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
    for value, averager in enumerate(living, start=1):
        with averager.get_tensors() as (gradient,):
            gradient.fill_(value)
        averager.local_samples_accumulated = 1
    for control in controls[:2]:
        control.weight = 1.0
        control.allow_allreduce()
    for control in controls[:2]:
        # whoever neither averages for the dead one nor gets anything from it does not know
        assert control.result(60).keys() >= {averager.peer_id for averager in living}
    controls[2].cancel()
    for averager in living:
        with averager.get_tensors() as (gradient,):
            # as small as it is, one peer averages all of it; where that was the dead one, it stays as it was
            assert sum(gradient.sub(1.5).abs() < 1e-6) in (0, 3)
