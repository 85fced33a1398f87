"""The estimate of an epoch's end, which may say nothing."""

from __future__ import annotations

import math

import pytest
from hivemind.optim.progress_tracker import GlobalTrainingProgress, LocalTrainingProgress
from hivemind.utils import get_dht_time

from hivenb.engine.progress.estimate import gathered_by, seconds_left, seconds_until


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


#: Of an epoch.
TARGET = 1000.0

NOW = 5000.0


def until(*told: tuple[int, float, float], epoch: int = 3) -> float:
    """Seconds until an epoch is over, by the samples, speeds and ages of the reports of this peer and of others."""
    reports = {
        number: LocalTrainingProgress(
            peer_id=b"peer",
            epoch=3,
            samples_accumulated=samples,
            samples_per_second=speed,
            time=NOW - age,
            client_mode=False,
        )
        for number, (samples, speed, age) in enumerate(told)
    }
    return seconds_until(TARGET, gathered_by(NOW, reports, 0, epoch, TARGET))


@pytest.mark.parametrize(
    ("told", "seconds"),
    [
        ([(100, 100.0, 0.0), (100, 100.0, 0.0)], 4.0),
        ([(100, 100.0, 2.0), (100, 100.0, 1.0)], 2.5),
        ([(0, 500.0, 0.0), (0, 500.0, 0.0)], 1.0),
        ([(0, 500.0, 1.0), (0, 500.0, 1.0)], 0.0),
        ([(0, 900.0, 0.9), (0, 100.0, 0.9)], 0.1),
        ([(90, 100.0, 0.0), (900, 900.0, 0.0)], 0.01),
        ([(0, 250.0, 0.0)] * 4, 1.0),
        ([(1000, 1.0, 0.0), (0, 1.0, 0.0)], 0.0),
    ],
    ids=["alike", "late", "short", "over", "this one is faster", "another one is", "of four", "by this one alone"],
)
def test_an_epoch_is_over_when_all_have_gathered_it(told: list[tuple[int, float, float]], seconds: float) -> None:
    assert until(*told) == pytest.approx(seconds, abs=1e-6)


@pytest.mark.parametrize("liar", [(0, 1e12, 0.0), (0, 1e12, 0.5), (0, 1.0, 1e9), (0, 1e12, 1e9)], ids=str)
def test_whatever_speed_another_one_claims_it_counts_for_a_share_beyond_what_it_has_reported(
    liar: tuple[int, float, float],
) -> None:
    assert until((0, 100.0, 0.0), liar) == pytest.approx(5.0)
    assert until((0, 100.0, 0.0), *[(0, 100.0, 0.0)] * 2, liar) == pytest.approx(2.5)


def test_one_at_another_epoch_has_gathered_nothing_yet() -> None:
    assert until((0, 100.0, 1.0), (0, 100.0, 1.0), epoch=4) == pytest.approx(5.0)


def test_where_nobody_gathers_anything_it_never_is() -> None:
    assert until((0, 0.0, 0.0), (0, 0.0, 0.0)) == math.inf
