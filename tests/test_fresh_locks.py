from __future__ import annotations

import os
import threading

import pytest

from hivenb._fresh_locks import free_in_children

pytestmark = pytest.mark.process


@pytest.mark.parametrize("make", [threading.Lock, threading.RLock])
def test_a_child_finds_it_free_and_its_parent_holds_it_still(make):
    lock, may_end, is_held = make(), threading.Event(), threading.Event()
    free_in_children(lock)

    def hold() -> None:
        with lock:
            is_held.set()
            may_end.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    is_held.wait(60)
    child = os.fork()
    if child == 0:
        os._exit(0 if lock.acquire(blocking=False) else 1)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not lock.acquire(blocking=False)
    finally:
        may_end.set()
        holder.join(60)
    assert lock.acquire(blocking=False)
