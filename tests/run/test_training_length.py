"""How long a run has trained, from its marks, and how far it is, from a Trainer of Lightning's own."""

from __future__ import annotations

import math
import time
from typing import Any

import lightning
import pytest
from tiny import TinyModel, loader

from hivenb.history import Event, History
from hivenb.run.training_length import Length, length_of, trained_seconds


def run_marks(*marks: tuple[float, str]) -> list[Event]:
    return [Event(at, "run", text) for at, text in marks]


def test_the_time_between_a_stop_and_the_next_start_does_not_count() -> None:
    marks = run_marks((0.0, "started"), (30.0, "stopped"), (90.0, "resumed"))
    assert trained_seconds(marks, None) == 30.0
    assert trained_seconds(marks, 100.0) == 40.0
    assert trained_seconds([*marks, *run_marks((110.0, "failed: ValueError"))], None) == 50.0
    assert trained_seconds(run_marks((5.0, "the swarm cannot be read: x")), 9.0) == 0.0


def test_a_pause_does_not_count_either_and_may_end_in_a_stop() -> None:
    marks = run_marks((0.0, "started"), (30.0, "paused"), (90.0, "resumed"), (95.0, "paused"))
    assert trained_seconds(marks, 200.0) == 35.0
    marks += run_marks((300.0, "stopped"))
    assert trained_seconds(marks, None) == 35.0


def test_a_run_that_was_not_started_has_no_length() -> None:
    assert length_of(None, History().snapshot(), False) == Length()


class Looks(lightning.Callback):
    """Looks at the length after each batch."""

    def __init__(self) -> None:
        self.history, self.seen = History(), list[Length]()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.history.mark("run", "started", time=time.time() - 100)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen.append(length_of(trainer, self.history.snapshot(), True))


@pytest.mark.parametrize(
    ("limits", "goal", "unit"),
    [
        ({"max_epochs": 4}, 4, "pass"),
        ({"max_epochs": 1000, "max_steps": 30}, 30, "batch"),
        ({"max_epochs": -1}, None, ""),
    ],
)
def test_the_goal_is_what_ends_the_run_first(tmp_path: Any, limits: Any, goal: int | None, unit: str) -> None:
    looks, data = Looks(), loader()
    trainer = lightning.Trainer(
        **limits,
        limit_train_batches=10,
        callbacks=[looks],
        default_root_dir=tmp_path,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"max_time": {"seconds": 1}} if goal is None else {}),
    )
    trainer.fit(TinyModel(), data)
    assert all(seen.goal == goal and seen.seconds >= 100 for seen in looks.seen)
    if goal is None:
        assert looks.seen[-1].seconds_left is None
        return
    assert {seen.unit for seen in looks.seen} == {unit}
    middle = looks.seen[len(looks.seen) // 2]
    assert middle.seconds_left is not None
    assert 80 < middle.seconds_left < 120, "half of it is done after 100 s"
    left = [math.inf if seen.seconds_left is None else seen.seconds_left for seen in looks.seen]
    assert left == sorted(left, reverse=True)
    assert length_of(trainer, looks.history.snapshot(), False).done == goal
