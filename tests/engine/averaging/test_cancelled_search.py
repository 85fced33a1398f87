"""A search for a group that was given up leaves nothing behind for those who come later to meet."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind tells a stream by typing's own class

import pytest
from hivemind.averaging.control import AveragingStage
from hivemind.p2p import P2PContext
from hivemind.proto import averaging_pb2
from hivemind.utils import get_dht_time
from in_memory.real_time import RealTimeSwarm

from hivenb.engine.averaging.gradient_averager import GradientAverager
from hivenb.engine.network.dht import DHT

ROUNDS = 20


@pytest.fixture
def averagers(dht: DHT, joining_dht: DHT, make_averager: Callable[..., GradientAverager]) -> list[GradientAverager]:
    return [make_averager(own, min_matchmaking_time=1.0, request_timeout=1.0) for own in (dht, joining_dht)]


def test_a_cancelled_search_does_not_take_the_place_of_a_later_one(
    averagers: list[GradientAverager], eventually: Callable[..., None]
) -> None:
    """A peer that is alone schedules a round in each epoch and cancels it; hivemind searches on until the timeout."""
    first, second = averagers
    for _ in range(ROUNDS):
        given_up = first.schedule_step(timeout=60.0)
        eventually(lambda given_up=given_up: given_up.stage is AveragingStage.LOOKING_FOR_GROUP)
        assert given_up.cancel()
        eventually(lambda given_up=given_up: given_up.stage is AveragingStage.FINISHED, 5.0)
    controls = [one.step(wait=False, timeout=20.0) for one in (first, second)]
    assert [len(control.result(25.0)) for control in controls] == [2, 2]


class FarLeader(GradientAverager):
    """One whose followers hear late that it has begun, as they do over a long line."""

    #: released for each of them when it has begun, before they hear of it
    has_begun = threading.Semaphore(0)

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        async for message in super().rpc_join_group(request, context):
            if message.code == averaging_pb2.BEGIN_ALLREDUCE:
                self.has_begun.release()
                await asyncio.sleep(1.0)
            yield message


@pytest.mark.parametrize("shape", [3, 300_000], ids=["one-part", "a-part-for-each"])
def test_who_gives_up_while_its_leader_begins_lets_nobody_wait(
    shape: int,
    swarm_in_memory: RealTimeSwarm,
    make_averager: Callable[..., Any],
    expect_each_other: Callable[..., None],
    eventually: Callable[..., None],
) -> None:
    """Neither it nor the others know of that in time by themselves; of small models it may average no part at all."""
    waiting = {"min_matchmaking_time": 5.0, "request_timeout": 4.0, "sender_timeout": 90.0, "reducer_timeout": 180.0}
    kinds = FarLeader, GradientAverager, GradientAverager
    leader, leaver, other = (make_averager(swarm_in_memory.join(), shape=shape, kind=kind, **waiting) for kind in kinds)
    for epoch in range(4):
        expect_each_other(leader, leaver, other, epoch=epoch)
        controls = {}
        for later, averager in enumerate((leader, leaver, other)):  # whose time comes first leads
            at = get_dht_time() + 6.0 + 10.0 * later
            controls[averager] = averager.schedule_step(at, gather=epoch, timeout=60.0)
            eventually(lambda of=controls[averager]: of.stage is AveragingStage.LOOKING_FOR_GROUP)
        assert all(leader.has_begun.acquire(timeout=30.0) for _ in (leaver, other))
        assert controls[leaver].stage is AveragingStage.LOOKING_FOR_GROUP, "it knows already that it is in"
        assert controls[leaver].cancel()
        rounds = [averager.step(control=controls[averager], wait=False) for averager in (leader, other)]
        for control in rounds:
            assert {leader.peer_id, other.peer_id} <= set(control.result(30.0))
