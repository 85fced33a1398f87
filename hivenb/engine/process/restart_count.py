"""How often something is started anew, and no more: what ends again and again would do so for ever."""

from __future__ import annotations

import time
from collections.abc import Callable

from hivenb.errors import ProcessEndedError

#: How often something is started anew within :data:`RESTARTS_WITHIN` seconds, and no more.
MOST_RESTARTS = 3
RESTARTS_WITHIN = 60.0


class RestartCount:
    """Counts how often one thing was started anew of late. For one thread at a time.

    :param now: a clock, in seconds
    """

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._times: list[float] = []

    def add(self, ended: object) -> None:
        """Count one more start.

        :param ended: what has ended, in words or as an error
        :raises ProcessEndedError: if there were too many; this one is not counted then
        """
        now = self._now()
        self._times = [one for one in self._times if now - one < RESTARTS_WITHIN]
        if len(self._times) >= MOST_RESTARTS:
            raise ProcessEndedError(
                f"{ended}, after it had been started anew {MOST_RESTARTS} times within {RESTARTS_WITHIN:.0f} s"
            )
        self._times.append(now)

    def forget(self) -> None:
        """Count from the beginning."""
        self._times.clear()

    def __len__(self) -> int:
        return len(self._times)
