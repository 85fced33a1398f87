"""Locks that a process has taken along when it was killed, and that nobody else would ever get."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hivemind.utils import get_logger

logger = get_logger(__name__)

#: Seconds after which a lock that the living hold for microseconds is held by the dead.
_HELD_BY_THE_DEAD = 1.0


def free_abandoned(locks: Iterable[Any]) -> None:
    """Release those locks of several processes that one of them was killed with.

    :param locks: of ``multiprocessing``; one that a thread of this process holds stays as it is
    """
    for lock in locks:
        if lock.acquire(timeout=_HELD_BY_THE_DEAD):
            lock.release()
        elif not lock._semlock._count():  # of those, a semaphore knows in this process only
            logger.warning("A process was killed while it held a lock that others need; the lock is free again")
            lock.release()
