"""The one thread that writes a dashboard's widgets.

ipywidgets does not lock a widget's state, and a handler that works keeps the kernel busy. So handlers only
hand their work in here, and all drawing happens here.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

from hivenb.engine.process.interrupts import BackgroundThread

_open: weakref.WeakSet[Refresher] = weakref.WeakSet()

#: Drawing may take at most this share of the thread's time, so that a slow machine trains rather than draws.
_BUSY_SHARE = 0.25


class Refresher:
    """Draws again and again, at a bounded pace, and does what handlers hand in. It never prints.

    :param draw: draws a frame if something has changed
    :param failed: shows what went wrong; called on this thread with the exception and "draw" or "action"
    :param interval: least seconds between two frames
    """

    def __init__(
        self, draw: Callable[[], None], failed: Callable[[Exception, str], None], interval: float = 0.5
    ) -> None:
        self._draw = draw
        self._failed = failed
        self._interval = interval
        self._actions: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._thread = BackgroundThread(target=self._work, name="hivenb-dashboard")
        self.error: Exception | None = None

    @property
    def is_alive(self) -> bool:
        """Whether it still draws."""
        return self._thread.is_alive()

    @property
    def has_work(self) -> bool:
        """Whether something was handed in and not done yet."""
        return bool(self._actions)

    def start(self) -> None:
        """Begin to draw."""
        _open.add(self)
        self._thread.start()

    def submit(self, action: Callable[[], None]) -> None:
        """Have something done on the thread soon, in the order of the calls; returns at once.

        :param action: what it raises is shown, not lost
        """
        self._actions.append(action)
        self._wake.set()

    def close(self, timeout: float = 5.0) -> None:
        """Draw the last frame and end. May be called twice, and from any thread.

        :param timeout: seconds to wait for the thread; drawing that hangs for longer ends with the process
        """
        self._closed.set()
        self._wake.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        _open.discard(self)

    def _work(self) -> None:
        due = 0.0
        while not self._closed.is_set():
            self._wake.wait(max(0.0, due - time.monotonic()))
            self._wake.clear()
            self._act()
            if time.monotonic() >= due:
                began = time.monotonic()
                self._attempt(self._draw, "draw")
                took = time.monotonic() - began
                due = began + max(self._interval, took / _BUSY_SHARE)
        self._act()
        self._attempt(self._draw, "draw")

    def _act(self) -> None:
        while self._actions:
            self._attempt(self._actions.popleft(), "action")

    def _attempt(self, task: Callable[[], None], kind: str) -> None:
        try:
            task()
        except Exception as error:
            # This thread must not end, and must not print: the panel is where errors belong.
            self.error = error
            try:
                self._failed(error, kind)
            except Exception as worse:
                self.error = worse


@atexit.register
def _close_all() -> None:
    # A thread inside of Agg while the interpreter is taken apart can crash the process.
    for refresher in list(_open):
        refresher.close(timeout=1.0)
