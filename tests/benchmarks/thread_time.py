"""What the time of a thread goes to: it computes, it waits for a core of a busy machine, or for something else."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Spent:
    """Seconds.

    :param wall: by the clock
    :param computing: on a core
    :param queueing: ready, with all cores taken by others; 0 where the kernel does not tell
    """

    wall: float = 0.0
    computing: float = 0.0
    queueing: float = 0.0

    @property
    def waiting(self) -> float:
        """For a lock, a process or the network."""
        return max(0.0, self.wall - self.computing - self.queueing)

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.wall + other.wall, self.computing + other.computing, self.queueing + other.queueing)

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.wall - other.wall, self.computing - other.computing, self.queueing - other.queueing)


def spent() -> Spent:
    """By the present thread so far; of interest is the difference of two."""
    return Spent(time.perf_counter(), time.thread_time(), _queueing())


def _queueing() -> float:
    # https://docs.kernel.org/scheduler/sched-stats.html: time on the core, time in the queue for one, number of turns
    file = _scheduling_of(threading.get_native_id())
    return 0.0 if file is None else int(os.pread(file, 100, 0).split()[1]) / 1e9


@cache
def _scheduling_of(thread: int) -> int | None:
    # kept open: to open it takes longer than many a step
    try:
        return os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY)
    except OSError:
        return None
