"""Memory that a process has freed, given back to the system.

glibc keeps what is freed, in as many arenas as there are threads (https://man7.org/linux/man-pages/man3/mallopt.3.html,
M_ARENA_MAX, M_TRIM_THRESHOLD), and gives back the end of one only. A process that sends and receives messages of half a
megabyte, now on this thread and now on that, fills gap after gap, and grows for hours. Large blocks would have pages of
their own (M_MMAP_THRESHOLD), but what is large grows with each such block that is freed, up to 32 MB. What is in a
circle is not even freed before Python looks for it: seldom, as its looks go by the number of objects, and a tensor is
one of them.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Callable

from hivenb.engine.process.interrupts import BackgroundThread

#: Seconds between two times: it takes a few milliseconds in a child, whose inherited objects are frozen.
INTERVAL = 10.0

#: Bytes from which a block has pages of its own, which go back when it is freed. More than a message of hivemind's with
#: a part of a tensor, half a megabyte: the system would clear new pages for each, which takes longer than all else.
LARGE = 1024 * 1024

#: In malloc.h, and the variable by which glibc is told the same.
_M_MMAP_THRESHOLD, _SETTING = -3, "MALLOC_MMAP_THRESHOLD_"


def give_back_regularly() -> None:
    """Let this process give freed memory back from now on, where its C library can."""
    library = ctypes.CDLL(None)
    try:
        trim, set_option = library.malloc_trim, library.mallopt
    except AttributeError:  # not glibc
        return
    if _SETTING not in os.environ:  # where memory is scarce, whoever started Jupyter may want less
        set_option(_M_MMAP_THRESHOLD, LARGE)
    BackgroundThread(target=_give_back, args=(trim,), name="give-memory-back").start()


def _give_back(trim: Callable[[int], int]) -> None:
    never = threading.Event()
    while not never.wait(INTERVAL):
        gc.collect()
        trim(0)
