"""Copies between a model's device and the averaging buffers in main memory, beside which the device goes on computing.

CUDA copies memory that the system may move in its turn among the computing, and by way of a small buffer of its own.
Pinned memory the device reads and writes itself, on a stream of its own, at the rate of the bus:
https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Sequence
from itertools import chain

import torch
from hivemind.utils import get_logger

logger = get_logger(__name__)

#: Bytes from which on memory is pinned that is not shared; of what is smaller, several lie in one page of the system.
_LARGE = 2**20

#: Pinned for all contexts of the process, of whichever device.
_PORTABLE = 1


class Staging:
    """Copies tensors between a device and main memory. For several threads, but for one at a time in the same tensors.

    What it copies to or from in main memory is pinned where it lies, if it is shared or large, until :meth:`close`.
    Without a GPU it copies as torch does.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._lock = threading.Lock()
        self._pinned: dict[int, torch.Tensor] = {}  # by address
        self._may_pin = True
        #: lets the system move again what was pinned
        self.close = weakref.finalize(self, _unpin, self._pinned, os.getpid())
        self.close.atexit = False

    @torch.no_grad()
    def copy(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Copy each source to its target, and return when all is there.

        Waits for what computes the sources and for the copies; not for what is computed from now on.

        :param sources: of any types; what lies in main memory is to lie there for long
        :param targets: as many, of the same shapes
        """
        device = next((tensor.device for tensor in chain(sources, targets) if tensor.is_cuda), None)
        if device is None:
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)
            return
        with self._lock, torch.cuda.device(device):
            self._stream = self._stream or torch.cuda.Stream()
            self._pin([tensor for tensor in chain(sources, targets) if not tensor.is_cuda])
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
            done = self._stream.record_event()
        done.synchronize()

    def _pin(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if not self._may_pin or not tensor.nbytes or tensor.data_ptr() in self._pinned:
                continue
            if not tensor.is_shared() and tensor.nbytes < _LARGE:
                continue
            error = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, _PORTABLE)
            if int(error) == 0:
                self._pinned[tensor.data_ptr()] = tensor
                continue
            self._may_pin = False
            why = torch.cuda.cudart().cudaGetErrorString(error)
            logger.warning(f"Averaging buffers are copied slower than they could be, as they are not pinned: {why}")
            with contextlib.suppress(RuntimeError):  # else the next kernel would be said to have failed, with this
                torch.zeros(1, device="cuda")


def _unpin(pinned: dict[int, torch.Tensor], owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork, in which CUDA does not work
    for address in pinned:
        torch.cuda.cudart().cudaHostUnregister(address)
    pinned.clear()
