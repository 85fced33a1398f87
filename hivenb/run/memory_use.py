"""How much memory a training takes, on its own: a process itself keeps what it once had."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import time
from typing import Any

import psutil

from hivenb.run.monitor import resident_bytes
from hivenb.system.process_tree import own_descendants

#: Seconds between two searches for processes that have been started meanwhile.
_SEARCH_INTERVAL = 3.0


class MemoryUse:
    """The most memory that this process, and what it starts, have taken since this was made.

    What was there before does not count, nor do peers on this machine. To begin with, what nobody needs any longer is
    given back to the system, so that one training after the other is measured from the same ground. In main memory, a
    peak between two looks is not seen; that of GPUs is counted by torch, so nobody else may reset it meanwhile.
    """

    def __init__(self) -> None:
        _give_back()
        cuda = _cuda_in_use()
        for device in [] if cuda is None else range(cuda.device_count()):
            cuda.reset_peak_memory_stats(device)
        self._allocated = 0 if cuda is None else _total(cuda.memory_allocated)
        self._resident = resident_bytes()
        self._others = own_descendants()
        self._ours: frozenset[psutil.Process] = frozenset()
        self._searched_at = float("-inf")
        #: bytes of main memory at the look that saw the most
        self.peak = 0

    @property
    def gpu_peak(self) -> int | None:
        """Bytes that tensors of this process have taken on GPUs at once; ``None`` if it uses none."""
        cuda = _cuda_in_use()
        return None if cuda is None else _total(cuda.max_memory_allocated) - self._allocated

    def look(self) -> None:
        """Take a sample; takes some milliseconds."""
        if time.monotonic() >= self._searched_at + _SEARCH_INTERVAL:
            self._ours = own_descendants() - self._others
            self._searched_at = time.monotonic()
        here = resident_bytes() - self._resident
        self.peak = max(self.peak, here + sum(map(_unshared_bytes, self._ours)))


def _unshared_bytes(process: psutil.Process) -> int:
    """What would be free if that process ended; 0 if it has."""
    try:
        return int(process.memory_full_info().uss)
    except psutil.Error:
        return 0


def _give_back() -> None:
    gc.collect()
    if (cuda := _cuda_in_use()) is not None:
        cuda.empty_cache()
    with contextlib.suppress(AttributeError):  # not every C library can
        ctypes.CDLL(None).malloc_trim(0)


def _cuda_in_use() -> Any:
    torch = sys.modules.get("torch")  # who has not imported it has not used it
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


def _total(figure: Any) -> int:
    return sum(figure(device) for device in range(_cuda_in_use().device_count()))
