"""The estimate of an epoch's end, which may say nothing."""

from __future__ import annotations

import math

import pytest
from hivemind.optim.progress_tracker import GlobalTrainingProgress
from hivemind.utils import get_dht_time

from hivenb.engine.progress.tracker import seconds_left


def left(seconds: float) -> float | None:
    """Seconds left by a progress that ends in so many."""
    ends = get_dht_time() + seconds
    return seconds_left(GlobalTrainingProgress(0, 0, 100, 1, 0, eta_next_epoch=ends, next_fetch_time=ends))


def test_seconds_until_it_ends() -> None:
    estimated = left(60.0)
    assert estimated is not None
    assert 59.0 < estimated <= 60.0


def test_one_that_is_overdue_ends_now() -> None:
    assert left(-5.0) == 0.0


@pytest.mark.parametrize("seconds", [2e6, math.inf, math.nan])
def test_from_a_speed_of_nothing_nothing_can_be_told(seconds: float) -> None:
    assert left(seconds) is None
