"""Processes for tests that need peers, forked from a server that has imported what takes longest to start.

As those that are started by hand on other machines, they share nothing with each other but what was imported.
"""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from hivemind.utils import MPFuture
from hivemind.utils.asyncio import _AsyncContextWrapper

from hivenb.peers.fork_server import start_server

#: Lets such a process, and each that it forks, print where all its threads are.
TELL_WHERE = signal.SIGUSR1


def start(target: Callable[..., None], *args: Any) -> BaseProcess:
    """Call a function of a module in a process of its own, with arguments that can be pickled."""
    start_server()
    process = mp.get_context("forkserver").Process(target=_begin, args=(target, *args))
    process.start()
    return process


def end(connection: Connection, process: BaseProcess) -> None:
    """Let such a process end, which waits for a word on a connection; by force if it does not within 30 s."""
    connection.send("end")
    process.join(30)
    process.kill()
    process.join()


@dataclass(frozen=True)
class Ended:
    """What has become of such a process: its exit code, and what it has printed."""

    code: int
    out: str
    err: str


def run(target: Callable[..., None], *args: Any, seconds: float = 60.0) -> Ended:
    """Call a function in such a process, as a script that is run to its end; a fresh one would import for seconds."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = start(_redirected, target, args, out, err)
        process.join(seconds)
        was_late = process.is_alive()
        process.kill()
        process.join()
        assert not was_late, f"it takes longer than {seconds:.0f} s"
        assert process.exitcode is not None
        return Ended(process.exitcode, out.read_text(), err.read_text())


def _redirected(target: Callable[..., None], args: Sequence[Any], out: Path, err: Path) -> None:
    for number, path in ((1, out), (2, err)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    target(*args)


def _begin(target: Callable[..., None], *args: Any) -> None:
    # the server holds back interrupts, and processes that it forks would make others in the same way
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # where a shell has the tests in its background, what it starts ignores them
    signal.signal(signal.SIGINT, signal.default_int_handler)
    mp.set_start_method("fork", force=True)
    # a sibling that is killed while it holds one of these would stop all others for good
    MPFuture.reset_backend()
    _AsyncContextWrapper.EXECUTOR_LOCK = mp.Lock()
    for connection in args:
        if isinstance(connection, Connection):  # torch's helper would hold it for seconds after this process has ended
            os.set_inheritable(connection.fileno(), False)
    faulthandler.register(TELL_WHERE)
    target(*args)
