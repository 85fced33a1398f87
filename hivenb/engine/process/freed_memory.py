"""Memory that a process has freed: given back to the system, or kept for what is allocated next.

A process that trains on a CPU wants it kept: the gradients of a batch are freed before those of the next one are
computed, and pages that the system has to clear for them anew take as long as a tenth of the whole step. glibc keeps
less than a larger model needs, or nothing, as chance has it.

Its helpers want the opposite. glibc keeps what is freed, in as many arenas as there are threads
(https://man7.org/linux/man-pages/man3/mallopt.3.html, M_ARENA_MAX, M_TRIM_THRESHOLD), and gives back the end of one
only. A process that sends and receives messages of half a megabyte, now on this thread and now on that, fills gap
after gap, and grows for hours. Large blocks would have pages of their own (M_MMAP_THRESHOLD), but what is large
grows with each such block that is freed, up to 32 MB. What is in a circle is not even freed before Python looks for
it: seldom, as its looks go by the number of objects, and a tensor is one of them.
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

#: The largest value that glibc takes for it; larger blocks have pages of their own in each case.
LARGEST = 32 * 1024 * 1024

#: Bytes at the end of the main arena that may stay unused while a process trains.
KEPT = 1024 * 1024 * 1024

#: In malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3

#: The variables by which glibc is told the same: whoever has set one has decided.
_SETTING = "MALLOC_MMAP_THRESHOLD_"
_SETTINGS = frozenset({_SETTING, "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES"})


def keep_for_what_follows() -> None:
    """Let this process keep what it frees from now on, where its C library can, until :func:`give_freed_memory_back`.

    Blocks of up to :data:`LARGEST` bytes; and no arena of a thread gives memory back that it may need again.
    """
    if _SETTINGS & os.environ.keys():
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # none but glibc has it
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, LARGEST)
        set_option(_M_TRIM_THRESHOLD, KEPT)
        set_option(_M_TOP_PAD, 2 * LARGEST)  # an arena of a thread is extended by so much, and not shortened


def give_freed_memory_back() -> None:
    """Give back what this process has freed so far, where its C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


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
