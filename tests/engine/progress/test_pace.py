"""How often a peer reports itself, by what the others reckon with meanwhile, and by how many they are."""

from __future__ import annotations

import pytest
from hivemind.optim.progress_tracker import LocalTrainingProgress

from hivenb.engine.progress.failure_detector import AS_RECKONED, MAX_REFRESH_PERIOD, MISLED, Pace


def progress(samples: int, speed: float, time: float, epoch: int = 3) -> LocalTrainingProgress:
    return LocalTrainingProgress(
        peer_id=b"peer",
        epoch=epoch,
        samples_accumulated=samples,
        samples_per_second=speed,
        time=time,
        client_mode=False,
    )


@pytest.mark.parametrize(
    ("now", "seconds"),
    [
        (progress(300, 100.0, time=12.0), AS_RECKONED),
        (progress(305, 104.0, time=12.0), AS_RECKONED),
        (progress(280, 95.0, time=12.0), MISLED),
        (progress(320, 110.0, time=12.0), MISLED),
        (progress(0, 100.0, time=10.1, epoch=4), 0.0),
    ],
    ids=["as reckoned", "nearly so", "behind", "ahead", "a new epoch"],
)
def test_it_reports_early_when_the_others_would_reckon_wrongly(now: LocalTrainingProgress, seconds: float) -> None:
    assert Pace().report_due_after(now, progress(100, 100.0, time=10.0)) == seconds


@pytest.mark.parametrize(
    ("peers", "as_reckoned", "misled", "silence"),
    [
        (2, AS_RECKONED, MISLED, 1.2),
        (8, AS_RECKONED, 0.2, 1.2),
        (32, 1.6, 0.8, 2.4),
        (999, MAX_REFRESH_PERIOD, 1.5, 4.5),
    ],
)
def test_the_more_there_are_the_more_seldom_it_reports(
    peers: int, as_reckoned: float, misled: float, silence: float
) -> None:
    """Nobody would read more: all look at each other's reports the more seldom, too."""
    pace, reported = Pace(peers), progress(100, 100.0, time=10.0)
    assert pace.report_due_after(progress(300, 100.0, time=12.0), reported) == pytest.approx(as_reckoned)
    assert pace.report_due_after(progress(280, 95.0, time=12.0), reported) == pytest.approx(misled)
    assert pace.report_due_after(progress(0, 100.0, time=10.1, epoch=4), reported) == 0.0
    assert pace.look_period <= as_reckoned
    assert pace.silence == pytest.approx(silence)
