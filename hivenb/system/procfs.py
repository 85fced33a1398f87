"""What /proc says about this process and about those that it has started."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

#: How the helpers are called that Python and torch start in each process that needs them; they end with it.
_HELPERS = (b"multiprocessing.forkserver", b"multiprocessing.resource_tracker", b"torch_shm_manager")

_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Process:
    """A process, told apart from a later one of the same id.

    :param pid: its id
    :param started: clock ticks between the start of the machine and its own
    :param parent: id of its parent when it was looked at
    """

    pid: int
    started: int
    parent: int


def seconds_since_start() -> float:
    """How long this process has existed, the start of the interpreter included."""
    own = _read(os.getpid())
    if own is None:
        raise OSError("/proc is not mounted, so the start of this process is not known")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - own.started / os.sysconf("SC_CLK_TCK")


def descendants() -> frozenset[Process]:
    """The processes that this one has started, those that they have started, and so on, as far as they still run.

    Left out are the helpers of Python's multiprocessing and of torch that belong to this process and end with it.
    """
    numbers = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdecimal()]
    everybody = [process for process in map(_read, numbers) if process is not None]
    found: set[Process] = set()
    parents = {os.getpid()}
    while parents:
        children = {process for process in everybody if process.parent in parents} - found
        found |= children
        parents = {process.pid for process in children}
    return frozenset(process for process in found if not _is_own_helper(process))


def left_running(known: Iterable[Process], timeout: float) -> frozenset[Process]:
    """Which descendants still run, after they were all told to end.

    :param known: descendants seen before; their parents may be gone by now, so that they can no longer be found
    :param timeout: seconds that the last ones are given
    """
    deadline = time.monotonic() + timeout
    known = frozenset(known)
    while True:
        left = descendants() | {process for process in known if _is_same(process, _read(process.pid))}
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(_POLL_SECONDS)


def _read(pid: int) -> Process | None:
    """A process that runs; None for one that has ended, whether its parent has taken notice or not."""
    try:
        # the name, in parentheses, may itself hold spaces and parentheses
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    state, parent, started = fields[0], int(fields[1]), int(fields[19])
    return None if state in "ZX" else Process(pid, started, parent)


def _is_same(one: Process, other: Process | None) -> bool:
    return other is not None and one.started == other.started


def _is_own_helper(process: Process) -> bool:
    # Peers forked from the fork server have its command line; they are its children, not ours.
    if process.parent != os.getpid():
        return False
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        return any(helper in command for helper in _HELPERS)
    return False
