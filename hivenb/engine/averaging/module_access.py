"""A module while callbacks have it: what others download then is what was trained, whatever has been put into it.

A callback may put other weights into the module for a while, such as averaged ones to validate with. Between two
batches they *have* the module, and nobody reads it; what may take long, such as a validation, begins with a
copy of what was trained, which is read instead.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Collection, Iterable, Iterator

import torch

#: Seconds for which a download waits until a module is back of which there is no copy.
LONGEST_WAIT = 60.0

#: Seconds that the module is kept from callbacks at most, until a round in the background has read it.
READ_WITHIN = 10.0

_LOOK_AGAIN = 0.02


class ModuleAccess:
    """Whether a module is as training has left it, and a copy for when it is not. For several threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_released = self._has_ended = False
        self._kept: tuple[torch.Tensor, ...] | None = None
        self._is_to_be_read = False

    # -- the thread that trains ---------------------------------------------------------------------------------

    def release(self) -> None:
        """Others may write to the module from now on; waits for whoever reads it at the moment."""
        with self._changed:
            self._is_released = True

    @torch.no_grad()
    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy what was trained, to be read while callbacks have the module.

        :param tensors: as training has left them
        """
        kept = tuple(tensor.detach().to("cpu", copy=True) for tensor in tensors)
        with self._changed:
            self._kept = kept
            self._changed.notify_all()

    def acquire(self) -> None:
        """The module is as training has left it, and can be read again."""
        with self._changed:
            self._is_released, self._kept = False, None
            self._changed.notify_all()

    def end(self) -> None:
        """Nothing is read any more, and nobody waits for it."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def expect_read(self) -> None:
        """A round is about to begin that reads the module, maybe in the background."""
        self._is_to_be_read = True

    def wait_until_read(self, updates: Collection[concurrent.futures.Future[object]]) -> None:
        """Wait until a round in the background has read the module, as far as one is to.

        :param updates: that are under way in the background
        """
        if not (self._is_to_be_read and updates):
            return
        deadline = time.monotonic() + READ_WITHIN
        with self._changed:
            while self._is_to_be_read and not all(one.done() for one in updates) and time.monotonic() < deadline:
                self._changed.wait(_LOOK_AGAIN)

    # -- other threads --------------------------------------------------------------------------------------------

    def note_read(self) -> None:
        """A round has read the module."""
        with self._changed:
            self._is_to_be_read = False
            self._changed.notify_all()

    @contextlib.contextmanager
    def reading(self) -> Iterator[tuple[torch.Tensor, ...] | None]:
        """Read the module, which no callback gets meanwhile.

        :returns: what to read in its place; ``None`` for the module itself
        :raises TimeoutError: if callbacks have it for long, and there is no copy
        """
        with self._changed:
            is_there = self._changed.wait_for(
                lambda: not self._is_released or self._kept is not None or self._has_ended, LONGEST_WAIT
            )
            if not is_there or (self._is_released and self._kept is None):
                raise TimeoutError(
                    "the module is not as training has left it: a callback, or a hook of the module, has had it for "
                    f"{LONGEST_WAIT:.0f} s"
                    if not self._has_ended
                    else "training has ended"
                )
            yield self._kept if self._is_released else None
