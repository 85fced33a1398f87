from __future__ import annotations

import dataclasses
import io
import re
import threading
from contextlib import redirect_stdout

import numpy as np
import pytest
import tiny

import hivenb
from hivenb.errors import TrainingError
from hivenb.options import Options
from hivenb.run.status import RunState, RunStatus
from hivenb.run.wait_output import BAR, WIDTH, Goal, WaitingLine, clock, progress_line, whole_number
from hivenb.training import TrainingRun

STATUS = RunStatus(RunState.TRAINING, 8, 120, 40, 64, None, 1, 10.0, 10.0, 0.41234, None)


class Terminal(io.StringIO):
    """What somebody looks at."""

    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        """What stood in its line, one after the other."""
        return [line.rstrip() for line in self.getvalue().replace("\n", "\r").split("\r") if line]


def test_epochs_and_steps_to_go_are_a_bar_and_a_time() -> None:
    epochs = progress_line(Goal(10, None, 3, 100), STATUS, 8, seconds=20.0)
    assert epochs == f"swarm epoch 5/10 [{'#' * (BAR // 2)}{'.' * (BAR // 2)}]  loss 0.4123  20 s to go"
    assert progress_line(Goal(None, 40, 3, 100), STATUS, 8, 60.0).startswith("step 20/40")
    first = progress_line(Goal(10, None, 8, 120), dataclasses.replace(STATUS, loss=None), 8, 3.0)
    assert first == f"swarm epoch 0/10 [{'.' * BAR}]  3 s so far"
    paused = dataclasses.replace(STATUS, state=RunState.PAUSED)
    assert progress_line(Goal(None, None, 0, 0), paused, 8, 125.0) == "paused  swarm epoch 8  loss 0.4123  2:05 so far"


def test_times_are_as_people_read_them() -> None:
    assert [clock(seconds) for seconds in (0.4, 59.4, 60, 3725)] == ["0 s", "59 s", "1:00", "1:02:05"]


def test_a_goal_is_reached_from_where_the_run_was() -> None:
    goal = Goal(2, 10, epoch=5, step=100)
    assert not goal.is_reached(RunState.TRAINING, 7, 105)
    assert not goal.is_reached(RunState.TRAINING, 6, 110)
    assert goal.is_reached(RunState.TRAINING, 7, 110)
    assert not goal.is_reached(RunState.FINISHED, 6, 100)
    assert str(goal) == "2 swarm epochs and 10 steps"
    the_end = Goal(None, None, 0, 0)
    assert not the_end.is_reached(RunState.TRAINING, 100, 100)
    assert the_end.is_reached(RunState.STOPPED, 0, 0)
    assert str(the_end) == "the end"


def test_what_stood_there_before_is_written_over() -> None:
    with redirect_stdout(Terminal()) as terminal, WaitingLine() as line:
        line.show(Goal(10, None, 3, 100), STATUS, 8)
        line.leave("waited for 10 swarm epochs")
    assert len(terminal.lines) == 2
    assert terminal.lines[-1] == "waited for 10 swarm epochs"
    assert all(len(line.rstrip("\n")) == WIDTH for line in terminal.getvalue().split("\r") if line)


def test_an_interrupt_says_that_training_goes_on() -> None:
    def interrupted() -> None:
        with WaitingLine() as line:
            line.show(Goal(10, None, 3, 100), STATUS, 8)
            raise KeyboardInterrupt

    with redirect_stdout(Terminal()) as terminal, pytest.raises(KeyboardInterrupt):
        interrupted()
    assert terminal.lines[-1] == "training goes on"


def test_nothing_is_written_where_nobody_looks_nor_from_another_thread(monkeypatch) -> None:
    terminal = Terminal()

    def wait() -> None:
        with WaitingLine() as line:
            line.show(Goal(10, None, 3, 100), STATUS, 8)
            line.leave("waited")

    with redirect_stdout(terminal):
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
        assert terminal.getvalue() == ""
        monkeypatch.setattr(terminal, "isatty", lambda: False)
        wait()
    assert terminal.getvalue() == ""


class Tee:
    """Passes on what is printed, and can do no more."""

    def write(self, text: str) -> None:
        raise AssertionError("nobody looks")


def test_an_output_that_does_not_know_whether_it_is_a_terminal_is_none(monkeypatch) -> None:
    monkeypatch.setattr("sys.stdout", Tee())
    with WaitingLine() as line:
        line.leave("waited")


def test_epochs_and_steps_are_whole_numbers_however_they_are_written() -> None:
    assert [whole_number("steps", count) for count in (None, 0, 1e4, np.int64(3))] == [None, 0, 10_000, 3]
    line = progress_line(Goal(None, whole_number("steps", 40.0), 3, 100), STATUS, 8, 60.0)
    assert line.startswith("step 20/40 [####")
    for count in (2.5, "10", float("inf"), float("nan"), [3]):
        with pytest.raises(TrainingError, match=re.escape(f"epochs={count!r} is no whole number")):
            whole_number("epochs", count)


@pytest.mark.process
def test_waiting_for_a_run_shows_how_far_it_is() -> None:
    with hivenb.Swarm("waiting") as swarm, redirect_stdout(Terminal()) as terminal:
        options = Options(target_batch_size=64, run_id="waited-for")
        run = TrainingRun(tiny.PacedModel(), tiny.loader(), swarm=swarm, options=options, accelerator="cpu")
        run.start()
        assert run.wait(epochs=20, timeout=60)
        assert terminal.lines[-1] == "waited for 20 swarm epochs"
        assert any("/20 [" in line and "to go" in line and "loss" in line for line in terminal.lines)
        assert not run.wait(epochs=1000, timeout=0.6)
        assert terminal.lines[-1] == "waited for 1000 swarm epochs: not reached, training"
        run.stop()
        assert run.wait()
        assert terminal.lines[-1] == "waited for the end"
