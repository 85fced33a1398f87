"""A pipe to another process that knows who waits for an answer, so that nobody waits for a process that has ended."""

from __future__ import annotations

import concurrent.futures
import contextlib
import weakref
from concurrent.futures import InvalidStateError
from multiprocessing.connection import Connection
from typing import Any

from hivemind.utils import MPFuture
from hivemind.utils.mpfuture import UpdateType

#: What hivemind/averaging/averager.py:step asks for before it has a round to return, which fails by itself.
_TRIGGERS_OF_ROUND = "future_for_init"

#: Seconds within which an answer of this process to itself arrives, unless what stands before it has no end.
_ARRIVES_WITHIN = 2.0

#: All that are in use, by their ids.
_pipes: dict[int, weakref.ref[AnsweredPipe]] = {}


class AnsweredPipe:
    """The way into a process of hivemind's, whose messages are the name of a method and its arguments.

    It needs no lock, which a fork could copy while it is held: what is registered first is looked at last.

    :param connection: the pipe itself
    """

    def __init__(self, connection: Connection):
        self._connection = connection
        self._waiting: dict[int, tuple[str, weakref.ref[MPFuture]]] = {}
        #: why nobody answers any more; ``None`` while somebody does
        self.ended: Exception | None = None
        key = id(self)
        _pipes[key] = weakref.ref(self, lambda _: _pipes.pop(key, None))

    def send(self, message: tuple[str, Any, dict[str, Any]]) -> None:
        """Send a message. What waits for an answer to it fails if there will be none."""
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
            self._connection.send(message)
        except TypeError as e:
            if not self._connection.closed:
                raise
            # by another thread, between the check of multiprocessing/connection.py:send and its write to the handle
            raise OSError("handle is closed") from e

    def send_bytes(self, message: bytes) -> None:
        """Send what is a message already."""
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
