"""Where a stop finds training: in a pass, at its end, or in a pause; and from where another start goes on then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import tiny
from lightning import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.strategies import SingleDeviceStrategy

from hivenb.run.checkpoints import RunFolder
from hivenb.run.module_modes import KeptModes
from hivenb.run.pause_and_stop import Gate, Stage
from hivenb.run.status import RunState

pytestmark = [
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]


class Steered(SingleDeviceStrategy):
    """What a pause asks of a strategy, and no swarm."""

    optimizer = None

    def __init__(self) -> None:
        super().__init__(device="cpu", accelerator=None)

    def take_up(self, edited: Any, *, trains_on: bool = True) -> None:
        pass


class Counting(tiny.TinyModel):
    """Remembers the batches of each pass, and fails at the end of one that had none."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: list[list[int]] = []
        self.ended = 0
        self.losses: list[float] = []

    def on_train_epoch_start(self) -> None:
        self.passes.append([])
        self.losses = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.passes:  # of a resumed pass
            self.passes.append([])
        self.passes[-1].append(batch_idx)
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def on_train_epoch_end(self) -> None:
        self.ended += 1
        self.log("mean", sum(self.losses) / len(self.losses))


class Steers(Callback):
    """Does something at one moment of training.

    :param moment: name of a hook
    :param number: of its calls, from 1, at which it is done
    """

    def __init__(self, moment: str, number: int, do: Callable[[], None]):
        self._left, self._do = number, do
        setattr(self, moment, self._look)

    def _look(self, *args: Any) -> None:
        self._left -= 1
        if not self._left:
            self._do()


class Fitted:
    """A Trainer under a gate."""

    def __init__(self) -> None:
        self.stage, self.model, self.said = Stage(), Counting(), list[str]()
        self.gate = Gate(self.stage, KeptModes(self.said.append), lambda: None, lambda: None, self.said.append)

    def stop(self) -> None:
        self.gate.stop(lambda: None)

    def fit(self, *callbacks: Callback, checkpoint: Path | None = None, **kwargs: Any) -> lightning.Trainer:
        self.stage.enter(RunState.STARTING)
        quiet = {**tiny.QUIET, "enable_checkpointing": any(isinstance(one, ModelCheckpoint) for one in callbacks)}
        flags = {"max_epochs": 3, **quiet, **kwargs}
        self.trainer = lightning.Trainer(strategy=Steered(), callbacks=[*callbacks, self.gate], **flags)
        self.trainer.fit(self.model, tiny.loader(), tiny.loader(seed=1), ckpt_path=checkpoint)
        return self.trainer


def test_what_is_written_after_a_stop_in_mid_pass_says_where_that_was(tmp_path: Path) -> None:
    first = Fitted()
    writes = ModelCheckpoint(tmp_path, save_last=True, save_on_train_epoch_end=True)
    trainer = first.fit(writes, Steers("on_train_batch_end", 11, first.stop))
    assert first.model.passes == [[*range(8)], [0, 1, 2]]
    folder = RunFolder()
    folder.keep_state(trainer, first.gate.progress)
    for path in (Path(writes.last_model_path), Path(writes.best_model_path), folder.checkpoint):
        second = Fitted()
        second.fit(checkpoint=path)
        assert second.model.passes == [[*range(3, 8)], [*range(8)]], path


@pytest.mark.parametrize("validation", [1, 2])
def test_a_stop_in_the_validation_at_the_end_of_a_pass_begins_no_other(validation: int) -> None:
    first = Fitted()
    trainer = first.fit(Steers("on_validation_start", validation, first.stop))
    assert first.model.passes == [[*range(8)]] * validation
    assert first.model.ended == validation
    assert first.gate.progress is None
    assert trainer.should_stop
    folder = RunFolder()
    folder.keep_state(trainer, first.gate.progress)
    second = Fitted()
    assert second.fit(checkpoint=folder.checkpoint).current_epoch == 3
    assert second.model.passes == [[*range(8)]] * (3 - validation)


def test_a_training_of_so_many_steps_that_ends_with_a_pass_goes_on_with_the_next_one() -> None:
    first, folder = Fitted(), RunFolder()
    folder.keep_state(first.fit(max_steps=8, max_epochs=-1), first.gate.progress)
    second = Fitted()
    second.fit(checkpoint=folder.checkpoint, max_steps=16, max_epochs=-1)
    assert (second.model.passes, second.model.ended) == ([[*range(8)]], 1)


def test_a_pass_that_could_not_begin_is_trained_whole_by_the_next_start() -> None:
    def fail() -> None:
        raise OSError("no such file")

    first, folder = Fitted(), RunFolder()
    with pytest.raises(OSError, match="no such file"):
        first.fit(Steers("on_train_epoch_start", 2, fail))
    folder.keep_state(first.trainer, first.gate.progress)
    second = Fitted()
    second.fit(checkpoint=folder.checkpoint)
    assert second.model.passes == [[*range(8)]] * 2


def test_a_timer_of_somebody_ends_the_training_that_is_started_again() -> None:
    first, timer, folder = Fitted(), Timer("00:00:10:00"), RunFolder()
    folder.keep_state(first.fit(timer, Steers("on_train_batch_end", 3, first.stop)), first.gate.progress)
    before, second = timer.time_elapsed(), Fitted()
    timer._duration = before + 0.2
    second.fit(Steers("on_train_batch_end", 2, lambda: time.sleep(0.3)), timer, checkpoint=folder.checkpoint)
    assert len(second.model.passes[0]) == 2


def test_a_stop_in_a_validation_in_mid_pass_goes_on_in_that_pass() -> None:
    first = Fitted()
    trainer = first.fit(Steers("on_validation_start", 3, first.stop), val_check_interval=4)
    assert first.model.passes == [[*range(8)], [*range(4)]]
    folder = RunFolder()
    folder.keep_state(trainer, first.gate.progress)
    second = Fitted()
    second.fit(checkpoint=folder.checkpoint, val_check_interval=4)
    assert second.model.passes == [[*range(4, 8)], [*range(8)]]


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_pause_that_is_asked_for_in_a_validation_is_between_two_passes(goes_on: bool) -> None:
    fitted = Fitted()

    def pause() -> None:
        fitted.stage.close_gate()
        waiter.start()

    def end_pause() -> None:
        fitted.stage.wait_until(lambda: fitted.stage.state is RunState.PAUSED, 20.0)
        (fitted.stage.open_gate if goes_on else fitted.stop)()

    waiter = threading.Thread(target=end_pause)
    trainer = fitted.fit(Steers("on_validation_start", 1, pause))
    waiter.join()
    assert fitted.model.passes == [[*range(8)]] * (3 if goes_on else 1)
    assert fitted.model.ended == trainer.current_epoch == len(fitted.model.passes)
    assert fitted.said == (["paused", "resumed"] if goes_on else ["paused"])
