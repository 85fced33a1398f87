"""What an interrupt of a cell does not come in the middle of."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Hold interrupts back: what is done meanwhile is done as a whole. One that comes is dealt with at the end.

    A child forked, or a thread started meanwhile has SIGINT blocked, too. For this thread that is not enough: another
    one of the process that does not block it takes it, as those of a kernel do, and Python's handler runs on the main
    thread whichever has taken it (https://docs.python.org/3/library/signal.html#signals-and-threads).
    """
    with _handler_put_off():
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextlib.contextmanager
def _handler_put_off() -> Iterator[None]:
    """Call Python's handler of interrupts at the end, once, if one comes."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield  # it runs on another thread; or there is none, or one that is not Python's
        return
    came: list[FrameType | None] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(frame)

    try:
        signal.signal(signal.SIGINT, note)
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is note:  # nobody has set another one meanwhile
            signal.signal(signal.SIGINT, handler)
        if came:
            handler(signal.SIGINT, came[0])
