"""Which tests start processes, that no other test does, and that no process outlives its test."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

import psutil
import pytest

#: Fixtures that start processes. Tests that use one, be it through another fixture, are marked ``process``.
STARTING = frozenset(
    {
        "browser",
        "dht",
        "dockerfile",
        "home",
        "kernel",
        "lab",
        "older_python",
        "parent",
        "start_peer",
        "swarm",
        "swarms",
        "two_dhts",
        "wheel",
    }
)

#: Notebooks whose answers compare times, or memory at its peak, which beside others is where chance has it: marked
#: ``quiet``, as tests that do so are by themselves.
MEASURING = frozenset({"02_overlap.ipynb", "03_memory.ipynb"})

#: Seconds that processes are given to end after a test.
GRACE = 10.0

#: Started once by torch, to stay, as multiprocessing's own helpers do.
SHARER = "torch_shm_manager"

#: What Python tells of that starts a process; multiprocessing does so unheard where it does not fork.
_STARTS = frozenset({"os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"})

_forbidden_in: int | None = None


def mark(items: Iterable[pytest.Item]) -> None:
    """Marks tests that use a fixture which starts processes, and the cells of notebooks, which run in a kernel."""
    for item in items:
        if not isinstance(item, pytest.Function) or not STARTING.isdisjoint(item.fixturenames):
            item.add_marker(pytest.mark.process)
        if item.path.name in MEASURING:
            item.add_marker(pytest.mark.quiet)


def watch() -> None:
    """From now on, this interpreter can be kept from starting processes; see :func:`forbidden`."""

    def hear(event: str, args: Any) -> None:
        if event in _STARTS:
            _refuse_if_forbidden(event)

    def start(process: BaseProcess) -> None:
        _refuse_if_forbidden(f"the start of {process!r}")
        original(process)

    original = BaseProcess.start
    BaseProcess.start = start  # type: ignore[method-assign]
    sys.addaudithook(hear)


@contextmanager
def forbidden() -> Iterator[None]:
    """Whoever starts a process meanwhile, in any thread, gets an exception instead."""
    global _forbidden_in
    _forbidden_in = os.getpid()
    try:
        yield
    finally:
        _forbidden_in = None


def _refuse_if_forbidden(what: str) -> None:
    if _forbidden_in == os.getpid():
        pytest.fail(
            f"{what} in a test that is not marked 'process': mark it, or name the fixture in tests/processes.py"
        )


@contextmanager
def none_left() -> Iterator[None]:
    """Fails if a process is left behind that was not there before, a child of this one or of one of those.

    What a process started that was there before, such as a kernel shared by several tests, is left to that.
    """
    known = {process for process, _ in _walk(frozenset())}
    yield
    deadline = time.monotonic() + GRACE
    while (left := _left(known)) and time.monotonic() < deadline:
        time.sleep(0.05)
    if left:
        for process in left:
            _end(process)
        pytest.fail("left behind: " + "; ".join(f"{p.pid} {command}" for p, command in left.items()), pytrace=False)


def passing() -> set[psutil.Process]:
    """Living descendants of this process, but for those that are started once and stay."""
    return set(_left(set()))


def _left(known: set[psutil.Process]) -> dict[psutil.Process, str]:
    stays = {_forkserver(), resource_tracker._resource_tracker._pid}
    return {p: command for p, command in _walk(frozenset(known)) if p.pid not in stays and SHARER not in command}


def _forkserver() -> int | None:
    """The process that multiprocessing forks others from; what they run looks as if they were this one."""
    return forkserver._forkserver._forkserver_pid


def _walk(known: frozenset[psutil.Process]) -> Iterator[tuple[psutil.Process, str]]:
    """Living descendants of this process and what they run, except those that were known, with all theirs."""
    children: dict[int, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                children.setdefault(process.ppid(), []).append(process)
        except psutil.NoSuchProcess:
            continue
    waiting = [*children.get(psutil.Process().pid, ())]
    while waiting:
        process = waiting.pop()
        try:
            command = " ".join(process.cmdline())
        except psutil.NoSuchProcess:
            continue
        if process in known and process.pid != _forkserver():
            continue  # of those that the forkserver makes, each is somebody's own
        if process not in known:
            yield process, command
        waiting += children.get(process.pid, ())


def _end(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return
