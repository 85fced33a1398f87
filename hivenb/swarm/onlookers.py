"""Who looks at a swarm, and stops looking when it is closed."""

from __future__ import annotations

import weakref
from typing import Protocol


class Onlooker(Protocol):
    """What shows a swarm, or something of it."""

    def close(self) -> None:
        """Look no more, and let go of what was looked at. May be called twice."""


class Onlookers:
    """Those who look at one swarm, for as long as somebody else holds them. Any thread may call."""

    def __init__(self) -> None:
        self._onlookers: weakref.WeakSet[Onlooker] = weakref.WeakSet()

    def add(self, onlooker: Onlooker) -> None:
        """Let somebody know when the swarm is closed."""
        self._onlookers.add(onlooker)

    def close(self) -> None:
        """The swarm is closed."""
        for onlooker in list(self._onlookers):
            onlooker.close()

    def forget(self) -> None:
        """Let nobody know: the process ends, and takes them along."""
        self._onlookers.clear()
