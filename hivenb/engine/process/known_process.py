"""A process that is known by more than its number, which the system gives to another one after its end."""

from __future__ import annotations

import os
import select
import signal
import time
import weakref
from contextlib import suppress

import psutil

_POLL_SECONDS = 1.0


class KnownProcess:
    """A process of this machine, child of this one or not. Any thread may call.

    Where the system has them it is held by a descriptor (https://man7.org/linux/man-pages/man2/pidfd_open.2.html), and
    else told from others by the time at which it began.

    :param pid: its number, at a time when it is sure to be its own
    """

    def __init__(self, pid: int):
        self.pid = pid
        self._descriptor: int | None = None
        self._process: psutil.Process | None = None
        try:
            self._descriptor = os.pidfd_open(pid)
            weakref.finalize(self, os.close, self._descriptor)
        except ProcessLookupError:
            return
        except OSError:  # a kernel or a sandbox without them
            with suppress(psutil.NoSuchProcess):
                self._process = psutil.Process(pid)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has ended, and be it a zombie.

        :param timeout: at most this many seconds; without it, as long as it takes
        :returns: whether it has ended
        """
        if self._descriptor is None:
            return self._poll_for_end(timeout)
        # not select(): a notebook process may well own more than 1024 descriptors
        poller = select.poll()
        poller.register(self._descriptor, select.POLLIN)
        return bool(poller.poll(None if timeout is None else timeout * 1000))

    def _poll_for_end(self, timeout: float | None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._is_there():
            if deadline is not None and time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS if deadline is None else min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))
        return True

    def _is_there(self) -> bool:
        if self._process is None:
            return False
        with suppress(psutil.NoSuchProcess):
            return self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE
        return False

    def kill(self) -> None:
        """End it at once; nothing happens where it has ended already."""
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if self._descriptor is not None:
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
            elif self._process is not None:
                self._process.kill()


def wait_for_exit(pid: int, timeout: float | None = None) -> bool:
    """Wait until a process has ended, child of this one or not.

    :param pid: the process to wait for
    :param timeout: at most this many seconds; without it, as long as it takes
    :returns: whether it has ended
    """
    return KnownProcess(pid).wait(timeout)
