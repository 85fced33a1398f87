"""Where local peers are forked: a server process that has imported all that they need before."""

from __future__ import annotations

import importlib
import multiprocessing as mp
import os
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from hivenb._interrupts import interrupts_blocked
from hivenb.engine.process.socket_folder import place_sockets_of_multiprocessing
from hivenb.peers import copied_server
from hivenb.peers.main_module import ProcessWithoutMain, main_module

#: The program that a local peer runs: a module with a function ``main``. Named as one names the program of any other
#: process, not imported: it is built on all that is above this package, and a kernel that only adds peers needs none of
#: what they need.
PROGRAM = "hivenb.app.local_peer"

#: Imported once by the process that all local peers are forked from: they share its memory and start at once.
PRELOADED = ["hivenb.app._local_peer_preload"]

#: Whether the server has had all its imports. If it has ended since, an interrupt waits for those of the next one.
_has_server = False


def start_server() -> None:
    """Start the process that local peers are forked from, unless it runs already. Returns at once.

    Its imports take several seconds. A program that will need local peers calls this before its own imports, so
    that both happen at the same time.

    :raises PlatformError: if there is no folder for its socket
    """
    place_sockets_of_multiprocessing()
    mp.get_context("forkserver").set_forkserver_preload(PRELOADED)
    with interrupts_blocked():
        resource_tracker.ensure_running()  # which does not block SIGINT any more then, for what is started next
    with interrupts_blocked():
        if copied_server.is_wanted():
            copied_server.ensure_copy_runs([PROGRAM])
        else:
            forkserver.ensure_running()


def wait_for_server() -> None:
    """Wait for the imports of the server, the first time; an interrupt ends the wait.

    What the server is asked for meanwhile is a process that ends by itself, also if nobody knows of it.
    """
    global _has_server
    if not _has_server:
        start_server()
        process = ProcessWithoutMain(target=int)
        process.start()
        process.join()
        _has_server = True


def fork_peer(name: str, packed_recipe: bytes, log_path: Path) -> tuple[BaseProcess, Connection]:
    """Start a local peer, when the server can be asked: see :func:`wait_for_server`.

    :param name: of the process
    :param packed_recipe: what :func:`hivenb.peers.peer_recipe.make_recipe` gave
    :param log_path: where it is to write what it logs
    :returns: its process, and a connection for orders and reports
    """
    start_server()
    context = mp.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = ProcessWithoutMain(
        target=_run_program,
        args=(PROGRAM, packed_recipe, main_module(), theirs, os.getpid(), str(log_path)),
        name=name,
        daemon=False,  # it has children of its own
    )
    with interrupts_blocked():
        process.start()
    theirs.close()
    return process, ours


def _run_program(program: str, *arguments: Any) -> None:
    importlib.import_module(program).main(*arguments)
