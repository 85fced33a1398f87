"""A search for a group that was given up leaves nothing behind for those who come later to meet."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hivemind.averaging.control import AveragingStage

from hivenb.engine.averagers.gradient_averagers import GradientAverager
from hivenb.engine.dht.dht import DHT

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
