"""Children that never outlive their parent, however it ends.

Jupyter kills a kernel with SIGKILL, when no exit handler runs. So each child of ours watches its parent, and the system
kills a program that is not ours with its parent.
"""

from __future__ import annotations

import os
import select
import sys
import time
from pathlib import Path

from hivenb.engine.process.interrupts import BackgroundThread

_POLL_SECONDS = 1.0


def end_with(pid: int) -> None:
    """Let this process end as soon as another one has ended, whatever it is doing."""
    BackgroundThread(target=_exit_with, args=(pid,), name=f"watch-{pid}").start()


def _exit_with(pid: int) -> None:
    wait_for_exit(pid)
    os._exit(1)


def wait_for_exit(pid: int, timeout: float | None = None) -> bool:
    """Wait until a process has ended, child of this one or not.

    :param pid: the process to wait for
    :param timeout: at most this many seconds; without it, as long as it takes
    :returns: whether it has ended
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:  # a kernel or a sandbox without pidfd
        return _poll_for_exit(pid, timeout)
    try:
        # not select(): a notebook process may well own more than 1024 descriptors
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        return bool(poller.poll(None if timeout is None else timeout * 1000))
    finally:
        os.close(descriptor)


def _poll_for_exit(pid: int, timeout: float | None) -> bool:
    deadline = None if timeout is None else time.monotonic() + timeout
    while _exists(pid):
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS if deadline is None else min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))
    return True


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def tied_to_parent(command: list[str]) -> list[str]:
    """The same command, in a session of its own and killed by the kernel when the calling process dies.

    For a program that is not ours, and so can neither ignore SIGINT nor watch its parent.
    """
    # -I and -S: no site packages and no environment, so that the interpreter in between is there for milliseconds
    return [
        sys.executable,
        "-I",
        "-S",
        str(Path(__file__).with_name("_exec_tied.py")),
        str(os.getpid()),
        *command,
    ]
