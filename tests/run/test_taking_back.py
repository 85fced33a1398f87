"""A change that lets the loss of a real run rise is found while it trains, and a click takes it back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch

import hivenb
from hivenb.options import Options
from hivenb.training import TrainingRun

pytestmark = pytest.mark.process

#: Seconds that anything may take; the machine may be busy.
PATIENCE = 90.0

#: Swarm epochs before the change.
BEFORE = 60


def much_faster(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 100.0)


@pytest.mark.slow
def test_what_harms_is_named_and_a_click_takes_it_back(swarm: hivenb.Swarm, eventually: Callable[..., None]) -> None:
    model = tiny.PacedModel(optimizer=torch.optim.Adam, lr=0.02)
    options = Options(target_batch_size=32, matchmaking_time=1.0, averaging_timeout=20.0, run_id="taking-back")
    run = TrainingRun(model, tiny.loader(256, shuffle=True), swarm=swarm, options=options, accelerator="cpu")
    run.start()
    dashboard = hivenb.Dashboard(run)
    try:
        assert dashboard.widget is not None
        view: Any = dashboard._view
        eventually(lambda: run.status.epoch >= BEFORE, PATIENCE)
        run.apply(matchmaking_time=2.0)
        eventually(lambda: run.status.epoch >= 2 * BEFORE, PATIENCE)
        assert run.advice == ()
        run.apply(scheduler_fn=much_faster)
        eventually(lambda: view.marks_panel.buttons, PATIENCE)
        (advice,) = run.advice
        assert advice.text.startswith("Since learning rate schedule is ")
        assert advice.figures["after"] > 1.5 * advice.figures["before"]
        assert advice.changes == {"scheduler_fn": None}
        (button,) = view.marks_panel.buttons.values()
        button.click()
        eventually(lambda: run.options.scheduler_fn is None, PATIENCE)
        eventually(lambda: not view.marks_panel.buttons, PATIENCE)
        assert run.options.matchmaking_time == 2.0, "which has done no harm"
        run.pause()
        run.resume()
        assert [event.text for event in run.history.snapshot().events if event.breaks_trend] == ["started"]
        at = len(run.history.snapshot().series["loss"])
        eventually(lambda: low_again(run, at, advice.figures["after"]), PATIENCE)
    finally:
        dashboard.close()
        run.stop()


def low_again(run: TrainingRun, at: int, risen: float) -> bool:
    later = run.history.snapshot().series["loss"].values[at:]
    return len(later) > 5 and float(later[-5:].max()) < risen / 2
