"""What a person sees while ``run.wait()`` holds a cell or a terminal: how far it is, and how long it will take."""

from __future__ import annotations

import math
import sys
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hivenb.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hivenb.run.pause_and_stop import Stage
    from hivenb.run.recorder import Recorder
    from hivenb.run.status import RunState, RunStatus

#: Seconds between two looks.
LOOK_EVERY = 0.5

#: Characters of the line, whatever it says, so that nothing of what stood there before remains.
WIDTH = 78

#: Characters of its bar.
BAR = 20


@dataclass(frozen=True)
class Goal:
    """Where a run is to be: so much further than where it was.

    :param epochs: swarm epochs to go from there; ``None`` if they do not matter
    :param steps: batches of this peer to go from there; ``None`` if they do not matter
    :param epoch: where it was, in swarm epochs that had passed while it trained
    :param step: where it was, in batches
    """

    epochs: int | None
    steps: int | None
    epoch: int
    step: int

    @property
    def is_open(self) -> bool:
        """Whether only the end of the run is the goal."""
        return self.epochs is None and self.steps is None

    def is_reached(self, state: RunState, epoch: int, step: int) -> bool:
        """Whether a run that is in this state, and has come so far, is there."""
        if self.is_open:
            return not state.is_active
        return epoch >= self.epoch + (self.epochs or 0) and step >= self.step + (self.steps or 0)

    def __str__(self) -> str:
        wanted = ((self.epochs, "swarm epoch"), (self.steps, "step"))
        parts = [f"{count} {unit}" if count == 1 else f"{count} {unit}s" for count, unit in wanted if count]
        return " and ".join(parts) or "the end"


def whole_number(name: str, count: Any) -> int | None:
    """How many epochs or steps to wait for, as a whole number.

    :param name: of the argument
    :param count: what was given, such as ``1e4``; ``None`` if it does not matter
    :raises TrainingError: if it is no whole number
    """
    if count is None:
        return None
    try:
        whole = int(count)
    except (TypeError, ValueError, OverflowError):
        whole = None
    if whole is None or whole != count:
        raise TrainingError(f"{name}={count!r} is no whole number; give one, such as {name}=10")
    return whole


def progress_line(goal: Goal, status: RunStatus, passed: int, seconds: float) -> str:
    """How far a run has come on its way, in one line.

    :param passed: swarm epochs that have passed while it trained
    :param seconds: for which it has been waited
    """
    done, wanted, unit = passed - goal.epoch, goal.epochs, "swarm epoch"
    if not goal.epochs and goal.steps:
        done, wanted, unit = status.step - goal.step, goal.steps, "step"
    words = [] if status.state.value == "training" else [status.state.value]
    if wanted:
        done = min(max(done, 0), wanted)
        filled = BAR * done // wanted
        words.append(f"{unit} {done}/{wanted} [{'#' * filled}{'.' * (BAR - filled)}]")
    else:
        words.append(f"swarm epoch {status.epoch}")
    if status.loss is not None:
        words.append(f"loss {status.loss:.4g}")
    if wanted and done:
        words.append(f"{clock(seconds / done * (wanted - done))} to go")
    else:
        words.append(f"{clock(seconds)} so far")
    return "  ".join(words)


def clock(seconds: float) -> str:
    """Seconds as people read them, such as ``"45 s"``, ``"2:05"`` or ``"1:02:05"``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class WaitingLine:
    """One line of standard output that is written anew while a person waits; nothing where nobody looks.

    It shows in a notebook's cell and in a terminal, and only for the main thread: what another one prints would land
    in the cell that was run last. Nothing else than carriage returns is needed, which all front ends know.
    """

    def __init__(self) -> None:
        self._output: Any = sys.stdout if _somebody_looks() else None
        self._began = time.monotonic()

    def __enter__(self) -> WaitingLine:
        return self

    def show(self, goal: Goal, status: RunStatus, passed: int) -> None:
        """Say how far the run is."""
        self._write(progress_line(goal, status, passed, time.monotonic() - self._began), end="")

    def leave(self, text: str) -> None:
        """Leave a last line, the same each time that a notebook is run."""
        self._write(text, end="\n")
        self._output = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is not None:
            self.leave("training goes on" if isinstance(error, KeyboardInterrupt) else "")

    def _write(self, text: str, end: str) -> None:
        if self._output is not None:
            self._output.write(f"\r{text[:WIDTH]:<{WIDTH}}{end}")
            self._output.flush()


def wait_with_line(
    goal: Goal, stage: Stage, recorder: Recorder, status: Callable[[], RunStatus], timeout: float | None
) -> bool:
    """Wait until a run has reached a goal, or has ended, and tell in a line how far it is.

    :param stage: of the run
    :param recorder: of the run; it is looked at after each batch
    :param status: gives where it stands now
    :param timeout: at most this many seconds
    :returns: whether it has reached the goal
    """
    deadline = time.monotonic() + (math.inf if timeout is None else timeout)

    def is_there() -> bool:
        return goal.is_reached(stage.state, recorder.epochs, recorder.steps)

    def is_over() -> bool:
        return not stage.state.is_active or is_there()

    with WaitingLine() as line:
        while not stage.wait_until(is_over, max(0.0, min(LOOK_EVERY, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                break
            line.show(goal, status(), recorder.epochs)
        reached = is_there()
        line.leave(f"waited for {goal}" if reached else f"waited for {goal}: not reached, {stage.state.value}")
    return reached


def _somebody_looks() -> bool:
    if threading.current_thread() is not threading.main_thread():
        return False
    return type(sys.stdout).__module__.startswith("ipykernel.") or getattr(sys.stdout, "isatty", bool)()
