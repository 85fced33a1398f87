"""A child whose end is noticed at once, whoever ended it, and told to all who wait for it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import signal
import threading
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import InvalidStateError
from multiprocessing.util import is_exiting
from typing import Any

from hivemind.utils import MPFuture, get_logger

from hivenb.engine.process.abandoned_locks import free_abandoned
from hivenb.engine.process.answered_pipe import AnsweredPipe, is_heard, listen_anew
from hivenb.engine.process.child_process import ChildProcess, shared_locks
from hivenb.engine.process.interrupts import BackgroundThread
from hivenb.engine.process.known_process import wait_for_exit
from hivenb.errors import ProcessEndedError

logger = get_logger(__name__)

#: Seconds between two looks at a child that lives.
LOOK_EVERY = 2.0

#: Seconds for what a child that has ended has said before, and for the system to say how it has ended.
_LAST_WORDS = 2.0


class WatchedProcess(ChildProcess):
    """Mixin for hivemind's processes, of which each has a pipe that leads into it.

    hivemind waits for the answer of a process that was killed for ever. Here, whoever waits gets a
    :class:`ProcessEndedError` that says what has ended, and how.
    """

    #: what people call it
    title = "a process"

    #: why it has ended, if it was not told to
    ended: ProcessEndedError | None = None

    #: whether it is about to end as it should
    _is_dismissed = False

    _watcher: Any = None
    _outer_pipe: Any
    _popen: Any
    _ready: Any

    def start(self) -> None:
        if not isinstance(self._outer_pipe, AnsweredPipe):
            self._outer_pipe = AnsweredPipe(self._outer_pipe)
        self._outer_pipe.expect(self._ready)
        super().start()
        self._watcher = BackgroundThread(
            target=_watch, args=(weakref.ref(self), self._popen), name=f"end-of-{self.pid}"
        )
        self._watcher.start()

    def join(self, timeout: float | None = None) -> None:
        super().join(timeout)
        watcher = self._watcher
        if self._is_dismissed and watcher not in (None, threading.current_thread()) and not self.is_alive():
            watcher.join(_LAST_WORDS)  # it is about to end, too: nothing of a training is left behind

    def terminate(self) -> None:
        self._is_dismissed = True
        super().terminate()

    def kill(self) -> None:
        self._is_dismissed = True
        super().kill()

    def _was_ready(self, ready: Any) -> bool:
        """Whether it has ever worked. If not, whoever has started it knows why, or learns it now."""
        with contextlib.suppress(TimeoutError, concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
            return ready.exception(_LAST_WORDS) is None
        with contextlib.suppress(InvalidStateError):
            ready.set_exception(self._describe_end())
        return False

    def end_with(self, error: ProcessEndedError) -> None:
        """End it by force, since what it cannot work without has ended.

        :param error: which says what that is
        """
        if self.ended is not None or self._is_dismissed or not self.is_alive():
            return
        self.kill()
        self._conclude(error)

    def _look(self) -> None:
        """It lives; called every few seconds, on a thread of its own."""

    def _has_ended(self, error: ProcessEndedError) -> None:
        """It has ended by itself, or was killed; called on a thread of its own."""
        logger.warning(str(error))
        self._conclude(error)

    def _conclude(self, error: ProcessEndedError, locks: Iterable[Any] = ()) -> None:
        """Let nobody wait for it any longer.

        :param locks: that it shares with its parent
        """
        freed = free_abandoned((*shared_locks(), *locks))
        self.ended = error  # whoever sees it makes a successor, which would wait for such a lock, too
        if MPFuture._update_lock in freed and not is_heard():
            listen_anew(error)
        self._outer_pipe.end(error)

    def _describe_end(self) -> ProcessEndedError:
        return ProcessEndedError(f"{self.title} (process {self.pid}) {how_it_ended(self.exitcode)}", self.title)


@contextlib.contextmanager
def shut_down_on_error(process: Any) -> Iterator[None]:
    """Let no process be left behind that has begun to work, by whoever could not wait until it did.

    An answer can be lost with that of another process that was killed: it is there then, and has a successor's place.

    :param process: of hivemind's, to be shut down when the block raises an error
    """
    try:
        yield
    except BaseException:
        process.shutdown()
        raise


def how_it_ended(exit_code: int | None) -> str:
    """How a process has ended, in words.

    :param exit_code: as ``multiprocessing`` and ``subprocess`` tell it; ``None`` if nobody knows
    """
    if exit_code is None:
        return "has ended"
    if exit_code >= 0:
        return f"has ended by itself with exit code {exit_code}"
    try:
        name = f" ({signal.Signals(-exit_code).name})"
    except ValueError:
        name = ""
    why = ", often by the system when memory runs out" if -exit_code == signal.SIGKILL else ""
    return f"was killed by signal {-exit_code}{name}{why}"


def _watch(reference: weakref.ref[WatchedProcess], start: Any) -> None:
    """Watch what one start of a process has led to; it may be started again.

    :param start: of multiprocessing's, with its id and how it has ended
    """
    # it is held only for moments: whom nobody else knows any more is ended
    while True:
        has_ended = wait_for_exit(start.pid, LOOK_EVERY)
        process = reference()
        if process is None or process._is_dismissed or is_exiting():
            return
        if has_ended or start.poll() is not None:
            break
        process._look()
        del process
    start.wait(_LAST_WORDS)
    ready = process._ready
    if process._popen is start and process._was_ready(ready) and not process._is_dismissed:
        process._has_ended(process._describe_end())
