"""How long training stands still in an optimizer's steps: all that they take besides the computing of gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class StepClock:
    """Runs while a step does anything but compute gradients. For the training thread."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._running_since: float | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let it run, as for the time of a step."""
        self._running_since = time.perf_counter()
        try:
            yield
        finally:
            self._hold()

    def paused(self, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """The same closure, which computes gradients, with the clock paused for it."""
        if closure is None:
            return None

        def computing() -> Any:
            self._hold()
            try:
                return closure()
            finally:
                self._running_since = time.perf_counter()

        return computing

    def restart(self) -> float:
        """Seconds for which it has run since the last time that it was asked."""
        is_running = self._running_since is not None
        self._hold()
        if is_running:
            self._running_since = time.perf_counter()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _hold(self) -> None:
        if self._running_since is not None:
            self._seconds += time.perf_counter() - self._running_since
            self._running_since = None
