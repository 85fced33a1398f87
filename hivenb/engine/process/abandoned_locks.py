"""Locks that a process has taken along when it was killed, and that nobody else would ever get."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from concurrent.futures import InvalidStateError
from typing import Any

from hivemind.utils import MPFuture, get_logger

logger = get_logger(__name__)

#: Seconds after which a lock that the living hold for microseconds is held by the dead.
_HELD_BY_THE_DEAD = 1.0


def free_abandoned(locks: Iterable[Any]) -> list[Any]:
    """Release those locks of several processes that one of them was killed with.

    :param locks: of ``multiprocessing``; one that a thread of this process holds stays as it is
    :returns: those that were released
    """
    freed = []
    for lock in locks:
        if lock.acquire(timeout=_HELD_BY_THE_DEAD):
            lock.release()
        elif not lock._semlock._count():  # of those, a semaphore knows in this process only
            logger.warning("A process was killed while it held a lock that others need; the lock is free again")
            lock.release()
            freed.append(lock)
    return freed


def listen_anew(error: Exception) -> None:
    """Take answers of other processes from a new pipe: one was killed in the middle of an answer in the old one.

    :param error: what those get who wait for an answer
    """
    waiting = list((MPFuture._active_futures or {}).values())
    MPFuture._active_pid = None  # hivemind/utils/mpfuture.py makes a pipe and a thread for the next future
    MPFuture()
    for reference in waiting:
        if (future := reference()) is not None and not future.done():
            with contextlib.suppress(InvalidStateError):
                future.set_exception(error)
