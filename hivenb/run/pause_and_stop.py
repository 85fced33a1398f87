"""Where the training thread looks up: to begin, to pause, to stop, and to let those who wait know."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import _TunerExitException

from hivenb.run.module_modes import KeptModes
from hivenb.run.paused_model import PausedModel
from hivenb.run.status import RunState
from hivenb.run.training_length import let_timers_go_on


class Stage:
    """The state of a run, shared by the thread that trains and those that steer and watch it.

    :attr:`changed` is to be held by whoever looks at the state and acts on it.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.state = RunState.READY
        self._entered_at, self._trained = time.monotonic(), 0.0
        self._is_open = True
        self._tasks: list[Callable[[], None]] = []

    def enter(self, state: RunState) -> None:
        """Change the state, and wake those who wait for it."""
        with self.changed:
            self._trained, self._entered_at = self.trained_seconds, time.monotonic()
            self.state = state
            if state in (RunState.STARTING, RunState.STOPPING):
                self._is_open = True
            self.changed.notify_all()

    @property
    def trained_seconds(self) -> float:
        """Seconds that were trained until now, from each start to the stop after it, without pauses."""
        with self.changed:
            trains = self.state in (RunState.TRAINING, RunState.STOPPING)
            return self._trained + (time.monotonic() - self._entered_at if trains else 0.0)

    def notify(self) -> None:
        """Wake those who wait for something else about the run."""
        with self.changed:
            self.changed.notify_all()

    def wait_until(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until something is so, looked at after each change.

        :param timeout: at most this many seconds
        :returns: whether it is so
        """
        with self.changed:
            return self.changed.wait_for(predicate, timeout)

    def close_gate(self) -> None:
        """Let training hold at its next batch."""
        self._is_open = False

    def open_gate(self) -> None:
        """Let training go on."""
        with self.changed:
            self._is_open = True
            self.changed.notify_all()

    @property
    def gate_is_open(self) -> bool:
        """Whether training may go on."""
        return self._is_open

    def hand_in(self, task: Callable[[], None]) -> None:
        """Let the thread that trains do something between two of its batches, also while it is paused.

        :param task: what it raises ends the run
        """
        with self.changed:
            self._tasks.append(task)
            self.changed.notify_all()

    @property
    def has_tasks(self) -> bool:
        """Whether anything was handed in that is not done."""
        return bool(self._tasks)

    def do_tasks(self) -> None:
        """Do all that was handed in; to be called by the thread that trains."""
        while self._tasks:
            self._tasks.pop(0)()

    def wait_at_gate(self, note: Callable[[str], None], paused: PausedModel) -> None:
        """Be paused until training may go on; to be called by the thread that trains.

        :param note: called with a word when the pause begins, and when training goes on
        :param paused: the model meanwhile
        """
        paused.hand_out()
        with self.changed:
            if self.state is RunState.TRAINING:
                self.enter(RunState.PAUSED)
                note("paused")
        while not self._is_open:
            self.wait_until(lambda: self._is_open or bool(self._tasks))
            if self._tasks:  # some change the model
                paused.take_back(trains_on=False)
                self.do_tasks()
                paused.hand_out()
        paused.take_back(trains_on=self.state is not RunState.STOPPING)
        with self.changed:
            if self.state is RunState.PAUSED:
                self.enter(RunState.TRAINING)
                note("resumed")


class Gate(Callback):
    """Lightning callback that lets a :class:`Stage` govern the Trainer, at the beginning, before each batch, and at the
    end of each pass.

    :param stage: of the run
    :param modes: of its model
    :param began: called when training begins
    :param step_aside: called before a pause, so that no other peer waits for this one
    :param note: called with a word when a pause begins, and when training goes on
    """

    def __init__(
        self,
        stage: Stage,
        modes: KeptModes,
        began: Callable[[], None],
        step_aside: Callable[[], None],
        note: Callable[[str], None] = lambda word: None,
    ):
        self._stage, self._modes, self._began, self._step_aside, self._note = stage, modes, began, step_aside, note
        #: whether the Trainer has set everything up, and taken over the checkpoint that it goes on from
        self.has_begun = False
        #: where in the data training was stopped, as Lightning's loop keeps it; ``None`` while it was not
        self.progress: dict[str, Any] | None = None
        #: the model, while training waits
        self.paused: PausedModel | None = None
        #: names of the parameters that somebody has changed in a pause that was the end
        self.edited: frozenset[str] = frozenset()

    def stop(self, end: Callable[[], None]) -> None:
        """Let training come to its end, from any thread.

        :param end: lets the Trainer know
        """
        with self._stage.changed:
            if self._stage.state.is_active:
                self._stage.enter(RunState.STOPPING)
                end()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.has_begun = True
        let_timers_go_on(trainer)
        self._modes.see_trainer(pl_module._trainer)
        with self._stage.changed:
            if self._stage.state is RunState.STOPPING:
                _end(trainer)
                return
            self._stage.enter(RunState.TRAINING)
        self._began()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._stage.do_tasks()
        self._wait_if_closed(trainer, pl_module)
        self._modes.before_batch()
        if self._stage.state is RunState.STOPPING:
            self.progress = trainer.fit_loop.state_dict()  # afterwards, Lightning counts this pass as a whole one
            _end(trainer)
            raise StopIteration  # what Lightning makes of a module's hook that skips the rest of this pass

    def on_train_batch_end(self, *args: Any) -> None:
        self._stage.notify()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        # not at the next batch: its pass would be left without one, and modules may fail at the end of such a pass
        self._wait_if_closed(trainer, pl_module)
        if self._stage.state is RunState.STOPPING and self.progress is None:
            _end(trainer)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        # in what ModelCheckpoint writes after the stop, Lightning would say that the pass is done
        if self.progress is not None:
            checkpoint["loops"]["fit_loop"] = self.progress

    def look_up_in_trial(self, trainer: Any) -> None:
        """Let training end amid what a tuner tries out, which puts things back; callbacks are not called there."""
        if self._stage.state is RunState.STOPPING:
            _end(trainer)
            raise _TunerExitException  # by which a tuner ends a Trainer that is to train no further

    def _wait_if_closed(self, trainer: Any, pl_module: Any) -> None:
        """Be paused until training may go on, if it may not now."""
        if self._stage.gate_is_open:
            return
        self._step_aside()
        self._modes.hand_out()
        self.paused = PausedModel(pl_module, trainer.strategy)
        try:
            self._stage.wait_at_gate(self._note, self.paused)
        finally:
            is_over = self._stage.state is RunState.STOPPING
            self.edited = self.paused.edited if is_over else frozenset()
            self.paused = None
        self._modes.take_back()


def _end(trainer: Any) -> None:
    """Let the Trainer end, whatever it was to train at least; to be called where no batch is under way."""
    trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None
    trainer.should_stop = True
