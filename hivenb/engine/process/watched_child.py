"""A child whose end is noticed at once, whoever ended it, and told to all who wait for it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import threading
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import InvalidStateError
from multiprocessing.connection import Connection
from multiprocessing.util import is_exiting
from typing import Any

from hivemind.utils import MPFuture, get_logger
from hivemind.utils.mpfuture import UpdateType

from hivenb.engine.process.child import ChildProcess, free_abandoned, make_room_for_answers, shared_locks
from hivenb.engine.process.interrupts import BackgroundThread
from hivenb.engine.process.known_process import wait_for_exit
from hivenb.errors import ProcessEndedError

# -- answered pipe ---------------------------------------------------------------------------------------------------
#
# A pipe to another process that knows who waits for an answer, so that nobody waits for a process that has ended.


#: What hivemind/averaging/averager.py:step asks for before it has a round to return, which fails by itself.
_TRIGGERS_OF_ROUND = "future_for_init"

#: Seconds within which an answer of this process to itself arrives, unless what stands before it has no end.
_ARRIVES_WITHIN = 2.0

#: All that are in use, by their ids.
_pipes: dict[int, weakref.ref[AnsweredPipe]] = {}


class AnsweredPipe:
    """The way into a process of hivemind's, whose messages are the name of a method and its arguments.

    To know who waits, it needs no lock: what is registered first is looked at last.

    :param connection: the pipe itself
    """

    def __init__(self, connection: Connection):
        self._connection = connection
        # multiprocessing/connection.py writes what is longer than 16 KiB in two parts, and others may in between
        self._writing = threading.RLock()
        self._waiting: dict[int, tuple[str, weakref.ref[MPFuture]]] = {}
        #: why nobody answers any more; ``None`` while somebody does
        self.ended: Exception | None = None
        key = id(self)
        _pipes[key] = weakref.ref(self, lambda _: _pipes.pop(key, None))

    def send(self, message: tuple[str, Any, dict[str, Any]]) -> None:
        """Send a message. What waits for an answer to it fails if there will be none."""
        make_room_for_answers()
        for name, value in message[2].items():
            if isinstance(value, MPFuture):
                self.expect(value, name)
        try:
            if self.ended is None:
                self._write(message)
        except OSError:
            if self.ended is None:  # otherwise that happened just now
                raise

    def _write(self, message: Any) -> None:
        try:
            with self._writing:
                self._connection.send(message)
        except TypeError as e:
            if not self._connection.closed:
                raise
            # by another thread, between the check of multiprocessing/connection.py:send and its write to the handle
            raise OSError("handle is closed") from e

    def send_bytes(self, message: bytes) -> None:
        """Send what is a message already."""
        with self._writing:
            self._connection.send_bytes(message)

    def expect(self, answer: MPFuture, name: str = "") -> None:
        """Let a future fail when the process ends before it has set it.

        :param name: of the argument that it was sent as
        """
        key = id(answer)
        self._waiting[key] = name, weakref.ref(answer, lambda _: self._waiting.pop(key, None))
        if self.ended is not None:
            self._settle(name, answer, self.ended)

    def end(self, error: Exception) -> None:
        """The process has ended: let all who wait for it, and all who will, know why."""
        self.ended = error
        self.lose_answers(error)

    def lose_answers(self, error: Exception) -> None:
        """What was asked is answered by nobody: let all who wait know why."""
        for key, (name, waiting) in list(self._waiting.items()):
            self._waiting.pop(key, None)  # one by one: another thread may have just asked for something else
            if (answer := waiting()) is not None:
                self._settle(name, answer, error)

    def close(self) -> None:
        """Send no more."""
        self._connection.close()

    def _settle(self, name: str, answer: MPFuture, error: Exception) -> None:
        if answer.done():
            return
        with contextlib.suppress(InvalidStateError):  # it was answered at the last moment
            if name == _TRIGGERS_OF_ROUND:
                answer.set_result((MPFuture(), MPFuture()))
            else:
                answer.set_exception(error)


def _free_pipes() -> None:
    """In a child, in which nobody writes who did when it was forked."""
    for reference in list(_pipes.values()):
        if (pipe := reference()) is not None:
            pipe._writing = threading.RLock()


os.register_at_fork(after_in_child=_free_pipes)


def is_heard() -> bool:
    """Whether answers of other processes still arrive, after one was killed that may have been in the middle of one.

    Most are written as a whole or not at all: the pipe takes 4 KiB at once. Of a longer one a part may be there, and
    all that others write would be taken for its end.
    """
    probe = MPFuture[None]()
    with MPFuture._update_lock:
        probe._sender_pipe.send((probe._uid, UpdateType.RESULT, None))
    with contextlib.suppress(TimeoutError, concurrent.futures.TimeoutError):
        return probe.exception(_ARRIVES_WITHIN) is None
    return False


def listen_anew(error: Exception) -> None:
    """Take answers of other processes from a new pipe: one was killed in the middle of an answer in the old one.

    :param error: what those get who wait for an answer, of whichever process
    """
    unanswered = MPFuture._active_futures or {}  # to which none is added once there is a new pipe
    MPFuture._active_pid = None  # hivemind/utils/mpfuture.py makes a pipe and a thread for the next future
    MPFuture()
    for pipe in [reference() for reference in list(_pipes.values())]:
        if pipe is not None:
            pipe.lose_answers(error)
    for reference in list(unanswered.values()):
        if (future := reference()) is not None and not future.done():
            with contextlib.suppress(InvalidStateError):
                future.set_exception(error)


# -- watched process -------------------------------------------------------------------------------------------------


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
    _popen: Any = None  # of multiprocessing's

    #: a future that is done as soon as it works; hivemind makes one in each of its processes
    _ready: Any = None

    #: the way into it, by the time it is started an :class:`AnsweredPipe`
    _outer_pipe: Any = None

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
