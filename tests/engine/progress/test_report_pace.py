"""When a peer reports itself, by what the others reckon with meanwhile."""

from __future__ import annotations

import pytest
from hivemind.optim.progress_tracker import LocalTrainingProgress

from hivenb.engine.progress.report_pace import AS_RECKONED, MISLED, due_after


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
    assert due_after(now, progress(100, 100.0, time=10.0)) == seconds
