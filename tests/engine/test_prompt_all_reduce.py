"""A peer that dies in a group that has met costs the others no deadline."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

import pytest
import torch
from hivemind.averaging.control import AveragingStage
from tiny import LOOPBACK

from hivenb.engine.averagers import GradientAverager
from hivenb.engine.dht import DHT
from hivenb.engine.epoch_matchmaking import ExpectedPeers


@pytest.fixture
def averagers(dht: DHT, run_id: str) -> Iterator[list[GradientAverager]]:
    """Three of three peers, that would wait for a silent one for longer than any test lasts."""
    with contextlib.ExitStack() as ended:
        made = []
        for _ in range(3):
            own = DHT(start=True, initial_peers=[str(a) for a in dht.get_visible_maddrs()], **LOOPBACK)
            ended.callback(lambda own=own: own.is_alive() and own.shutdown())
            averager = GradientAverager(
                [torch.nn.Parameter(torch.zeros(3))],
                dht=own,
                prefix=run_id,
                min_matchmaking_time=5.0,
                request_timeout=2.0,
                next_chunk_timeout=300.0,
                allreduce_timeout=600.0,
                start=True,
            )
            ended.callback(lambda averager=averager: averager.is_alive() and averager.shutdown())
            averager.expect_peers(ExpectedPeers((1, 1)))
            made.append(averager)
        yield made


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
