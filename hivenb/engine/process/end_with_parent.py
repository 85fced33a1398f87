"""Children that never outlive their parent, however it ends.

Jupyter kills a kernel with SIGKILL, when no exit handler runs. So each child of ours watches its parent, and the system
kills a program that is not ours with its parent.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hivenb.engine.process.interrupts import BackgroundThread
from hivenb.engine.process.known_process import wait_for_exit


def end_with(pid: int) -> None:
    """Let this process end as soon as another one has ended, whatever it is doing."""
    BackgroundThread(target=_exit_with, args=(pid,), name=f"watch-{pid}").start()


def _exit_with(pid: int) -> None:
    wait_for_exit(pid)
    os._exit(1)


def tied_to_parent(command: list[str], settings: str = "") -> list[str]:
    """The same command, in a session of its own and killed by the kernel when the calling process dies.

    For a program that is not ours, and so can neither ignore SIGINT nor watch its parent.

    :param settings: for its environment, ``NAME=VALUE``, with spaces between several
    """
    # -I and -S: no site packages and no environment, so that the interpreter in between is there for milliseconds
    return [
        sys.executable,
        "-I",
        "-S",
        str(Path(__file__).with_name("_exec_tied.py")),
        str(os.getpid()),
        settings,
        *command,
    ]
