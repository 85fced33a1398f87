"""Locks that a process has taken along when it was killed, and that nobody else would ever get."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from hivemind.utils import get_logger

from hivenb._fresh_locks import free_in_children

logger = get_logger(__name__)

#: Seconds after which a lock that the living hold for microseconds is held by the dead.
_HELD_BY_THE_DEAD = 2.0

#: How often this process has released each lock that it did not hold, which the lock counts as if it had.
_released: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

#: Two threads that find the same lock abandoned would release it twice, the second time from somebody living.
_one_frees = threading.Lock()
free_in_children(_one_frees)


def free_abandoned(locks: Iterable[Any]) -> list[Any]:
    """Release those locks of several processes that one of them was killed with.

    :param locks: of ``multiprocessing``; one that a thread of this process holds stays as it is
    :returns: those that were released
    """
    with _one_frees:
        return [lock for lock in locks if _free_if_abandoned(lock)]


def _free_if_abandoned(lock: Any) -> bool:
    if lock.acquire(timeout=_HELD_BY_THE_DEAD):
        lock.release()
        return False
    if lock._semlock._count() + _released.get(lock, 0):  # of those that hold it, it knows in this process only
        return False
    logger.warning("A process was killed while it held a lock that others need; the lock is free again")
    _released[lock] = _released.get(lock, 0) + 1
    lock.release()
    return True
