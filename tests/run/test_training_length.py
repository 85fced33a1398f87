"""How long a run has trained, and how far it is, from a Trainer of Lightning's own."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
from tiny import QUIET, TinyModel, loader

from hivenb.errors import TrainingError
from hivenb.run import pause_and_stop
from hivenb.run.fit import Fit
from hivenb.run.pause_and_stop import Stage
from hivenb.run.status import RunState
from hivenb.run.training_length import Beginning, Length, length_of, require_way_to_go


def test_pauses_and_the_time_between_a_stop_and_the_next_start_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(pause_and_stop.time, "monotonic", lambda: now)
    stage = Stage()
    for state, seconds, trained in (
        (RunState.STARTING, 5.0, 0.0),
        (RunState.TRAINING, 30.0, 30.0),
        (RunState.PAUSED, 60.0, 30.0),
        (RunState.TRAINING, 5.0, 35.0),
        (RunState.STOPPING, 1.0, 36.0),
        (RunState.STOPPED, 500.0, 36.0),
        (RunState.STARTING, 5.0, 36.0),
        (RunState.TRAINING, 4.0, 40.0),
        (RunState.FAILED, 90.0, 40.0),
    ):
        stage.enter(state)
        now += seconds
        assert stage.trained_seconds == trained


def test_a_run_that_was_not_started_has_no_length() -> None:
    assert length_of(None, 0.0, Beginning(), False) == Length()


class Looks(lightning.Callback):
    """Looks at the length after each batch, when it has trained for 100 s more than another run before it."""

    def __init__(self) -> None:
        self.seen = list[Length]()
        self.since = Beginning()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.since = Beginning.at(trainer, 1000.0)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen.append(length_of(trainer, 1100.0, self.since, True))


def fitted(folder: Any, looks: Looks, checkpoint: Any = None, **limits: Any) -> lightning.Trainer:
    """A Trainer after its training, of ten batches in a pass."""
    kwargs = {**QUIET, "callbacks": [looks], "default_root_dir": folder, "limit_train_batches": 10}
    trainer = lightning.Trainer(**kwargs, **limits)
    trainer.fit(TinyModel(), loader(), ckpt_path=checkpoint)
    return trainer


@pytest.mark.parametrize(
    ("limits", "goal", "unit"),
    [
        ({"max_epochs": 4}, 4, "pass"),
        ({"max_epochs": 1000, "max_steps": 30}, 30, "batch"),
        ({"max_epochs": -1}, None, ""),
    ],
)
def test_the_goal_is_what_ends_the_run_first(tmp_path: Any, limits: Any, goal: int | None, unit: str) -> None:
    looks = Looks()
    trainer = fitted(tmp_path, looks, **limits, **({"max_time": {"seconds": 1}} if goal is None else {}))
    assert all(seen.goal == goal and seen.seconds == 1100 for seen in looks.seen)
    if goal is None:
        assert looks.seen[-1].seconds_left is None
        return
    assert {seen.unit for seen in looks.seen} == {unit}
    middle = looks.seen[len(looks.seen) // 2]
    assert middle.seconds_left is not None
    assert 80 < middle.seconds_left < 120, "half of it is done after 100 s"
    left = [math.inf if seen.seconds_left is None else seen.seconds_left for seen in looks.seen]
    assert left == sorted(left, reverse=True)
    assert length_of(trainer, 1100.0, looks.since, False).done == goal


def test_a_run_whose_time_is_up_is_refused_unless_it_gets_more(tmp_path: Any) -> None:
    trainer = fitted(tmp_path, Looks(), max_epochs=-1, max_time={"milliseconds": 30})
    for limits, is_over in (
        ({"max_time": {"milliseconds": 30}}, True),
        ({"max_time": {"milliseconds": 30}, "min_steps": trainer.global_step}, True),
        ({"max_time": {"milliseconds": 30}, "min_steps": trainer.global_step + 1}, False),
        ({"max_time": {"milliseconds": 30}, "min_epochs": trainer.current_epoch + 1}, False),
        ({"max_time": {"hours": 1}}, False),
        ({}, False),
    ):
        again = lightning.Trainer(**QUIET, max_epochs=-1, **limits)
        with pytest.raises(TrainingError, match=r"max_time, .* seconds, is up\. For") if is_over else nullcontext():
            require_way_to_go(again, trainer)


def test_the_time_since_a_failure_does_not_count(tmp_path: Any) -> None:
    class Fails(lightning.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise ArithmeticError

    limits = {"max_epochs": -1, "max_time": {"milliseconds": 1}}
    failed, again = (lightning.Trainer(**QUIET, **limits, callbacks=[Fails()]) for _ in range(2))
    with pytest.raises(ArithmeticError):
        failed.fit(TinyModel(), loader())
    require_way_to_go(again, failed)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_checkpoint_whose_time_is_up_says_so_in_place_of_an_end(tmp_path: Any, is_stopped: bool) -> None:
    time = {"milliseconds": 30}
    fitted(tmp_path, Looks(), max_epochs=-1, max_time=time).save_checkpoint(tmp_path / "up.ckpt")
    seen = SimpleNamespace
    fit = Fit(
        lightning.Trainer(**QUIET, max_epochs=-1, max_time=time),
        strategy=seen(data_is_exhausted=False),  # type: ignore[arg-type]
        monitor=seen(error=None),  # type: ignore[arg-type]
        recorder=seen(steps=0),  # type: ignore[arg-type]
        gate=seen(has_begun=False),  # type: ignore[arg-type]
        modes=seen(begin=lambda model: None, end=lambda: None),  # type: ignore[arg-type]
        train=loader(),
        validation=None,
    )
    with nullcontext() if is_stopped else pytest.raises(TrainingError, match=r"max_time, .* seconds, is up"):
        fit(TinyModel(), tmp_path / "up.ckpt", lambda: is_stopped)


@pytest.mark.parametrize("is_written_in_a_pass", [False, True], ids=["after", "at the end of a pass"])
def test_what_a_checkpoint_has_brought_is_no_pace_of_this_run(tmp_path: Any, is_written_in_a_pass: bool) -> None:
    class Writes(Looks):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(tmp_path / "half.ckpt")

    trainer = fitted(tmp_path, Writes(), max_epochs=2)
    if not is_written_in_a_pass:
        trainer.save_checkpoint(tmp_path / "half.ckpt")
    looks = Looks()
    fitted(tmp_path, looks, tmp_path / "half.ckpt", max_epochs=4)
    assert looks.since.share == 0.5
    first, middle = looks.seen[0], looks.seen[len(looks.seen) // 2]
    assert first.seconds_left is None or first.seconds_left > 500, "a twentieth of what is left, in 100 s"
    assert middle.seconds_left is not None
    assert 80 < middle.seconds_left < 120, "half of it, and not a quarter, in 100 s"
