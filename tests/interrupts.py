"""Interrupts of this process that come as in a kernel: another thread takes them, which does not block SIGINT."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator

#: Seconds within which a signal is there.
_COMES_WITHIN = 20.0


@contextlib.contextmanager
def interruptible_thread() -> Iterator[Callable[[], None]]:
    """Give what interrupts this process, and returns when the signal has come; Python deals with it right after that.

    There is another thread meanwhile, which takes it if the main thread blocks it. For the main thread.
    """
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    read, write = os.pipe()
    os.set_blocking(write, False)
    previous = signal.set_wakeup_fd(write)

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert select.select([read], [], [], _COMES_WITHIN)[0], "nobody has taken it"
        os.read(read, 1)

    try:
        yield interrupt
    finally:
        signal.set_wakeup_fd(previous)
        end.set()
        thread.join()
        os.close(read)
        os.close(write)
