"""What this process has started, as far as it still runs and somebody has to end it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable

import psutil

#: How the helpers are called that Python and torch start in each process that needs them; they end with it.
_HELPERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker", "torch_shm_manager")

#: Helpers that are told by nothing else: processes forked from this one, by their numbers.
_forked_helpers: set[int] = set()

_POLL_SECONDS = 0.1


def count_as_helper(pid: int) -> None:
    """Take a process that this one has forked for a helper, which ends with it, for as long as it lives."""
    _forked_helpers.add(pid)


def descendants() -> frozenset[psutil.Process]:
    """The processes that this one has started, those that they have started, and so on, as far as they still run.

    Left out are the helpers of Python's multiprocessing and of torch that belong to this process and end with it.
    """
    found = psutil.Process().children(recursive=True)
    return frozenset(process for process in found if still_runs(process) and not _is_own_helper(process))


def own_descendants() -> frozenset[psutil.Process]:
    """As :func:`descendants`, without what was forked from the fork server: peers on this machine."""
    own = [child for child in psutil.Process().children() if not _is_own_helper(child)]
    found = set(own)
    for child in own:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            found.update(child.children(recursive=True))
    return frozenset(process for process in found if still_runs(process))


def left_running(known: Iterable[psutil.Process], timeout: float) -> frozenset[psutil.Process]:
    """Which descendants still run, after they were all told to end.

    They are looked at, not waited for, so that whoever has started them still learns how they have ended.

    :param known: descendants seen before; their parents may be gone by now, so that they can no longer be found
    :param timeout: seconds that the last ones are given
    """
    deadline = time.monotonic() + timeout
    known = frozenset(known)
    while True:
        left = descendants() | {process for process in known if still_runs(process)}
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(_POLL_SECONDS)


def still_runs(process: psutil.Process) -> bool:
    """Whether it has not ended; if it has, whether its parent has taken notice makes no difference."""
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _is_own_helper(process: psutil.Process) -> bool:
    # Peers forked from the fork server have its command line; they are its children, not ours.
    try:
        if process.ppid() != os.getpid():
            return False
        command = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return process.pid in _forked_helpers or any(helper in command for helper in _HELPERS)
