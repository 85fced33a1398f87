"""Processes for tests that need peers, forked from a server that has imported what takes longest to start.

As those that are started by hand on other machines, they share nothing with each other but what was imported.
"""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
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


def _begin(target: Callable[..., None], *args: Any) -> None:
    # the server holds back interrupts, and processes that it forks would make others in the same way
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    mp.set_start_method("fork", force=True)
    # a sibling that is killed while it holds one of these would stop all others for good
    MPFuture.reset_backend()
    _AsyncContextWrapper.EXECUTOR_LOCK = mp.Lock()
    for connection in args:
        if isinstance(connection, Connection):  # torch's helper would hold it for seconds after this process has ended
            os.set_inheritable(connection.fileno(), False)
    faulthandler.register(TELL_WHERE)
    target(*args)
