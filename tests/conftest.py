"""What all tests share: no process may outlive a test, and a swarm to test in."""

from __future__ import annotations

import ctypes
import itertools
import signal
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

import hivenb

#: Seconds that processes are given to end after a test.
GRACE = 10.0

#: Started once for each interpreter, by whoever needs them first, to stay.
HOUSEHOLD = ("multiprocessing.forkserver", "multiprocessing.resource_tracker", "torch_shm_manager")

_PR_SET_CHILD_SUBREAPER = 36
_numbers = itertools.count(1)


def pytest_configure() -> None:
    # Children of a process that was killed become ours, instead of the system's, and so cannot hide from the checks.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@pytest.fixture(autouse=True)
def interrupts_are_heard() -> None:
    """Lets all that a test starts take Ctrl-C.

    A shell lets what it runs in its background ignore it, and so does an averager of plain hivemind with the process
    that starts it: processes inherit that.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_children_left() -> Iterator[None]:
    """Fails a test that leaves a process behind, its own child or one of its children's.

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


def _left(known: set[psutil.Process]) -> dict[psutil.Process, str]:
    return {p: command for p, command in _walk(frozenset(known)) if not any(name in command for name in HOUSEHOLD)}


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
        if process in known and "multiprocessing.forkserver" not in command:
            continue  # of those that the forkserver makes, each is somebody's own
        if process not in known:
            yield process, command
        waiting += children.get(process.pid, ())


def _end(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Waits, with a bound, until something holds that another thread or process brings about."""

    def wait(condition: Callable[[], object], seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"did not happen within {seconds:.0f} s"
            time.sleep(0.02)

    return wait


@pytest.fixture
def swarm() -> Iterator[hivenb.Swarm]:
    """A swarm of this machine alone, for one test."""
    with hivenb.Swarm(f"test-{next(_numbers)}") as opened:
        yield opened
