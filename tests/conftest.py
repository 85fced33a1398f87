"""What all tests share: which of them run, what becomes of their processes, and a swarm to test in."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator

import processes
import pytest
from hypothesis import settings

import hivenb
from hivenb.peers.fork_server import VARIABLE

if "PYTEST_XDIST_WORKER" in os.environ:
    # Read when torch is imported: each worker has one core, and would else take all from the others.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Go's own value: a daemon that lives for a test only spends a quarter of its time looking for garbage, else.
    os.environ.setdefault("GOGC", "100")

# The same examples each time, and no limit to the time that one takes: the machine may be busy.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None, max_examples=40)
settings.load_profile("repeatable")

_PR_SET_CHILD_SUBREAPER = 36

#: Descriptors from which on garbage is looked for: it holds pipes of ended processes, and a shell often allows 1,024.
_MANY_DESCRIPTORS = 256

_numbers = itertools.count(1)


def pytest_configure() -> None:
    # Children of a process that was killed become ours, instead of the system's, and so cannot hide from the checks.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    processes.watch()


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    processes.mark(items)
    if "long" not in config.option.markexpr:
        long = [item for item in items if item.get_closest_marker("long")]
        items[:] = [item for item in items if not item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=long)
    _begin_with_the_longest(items)


def _begin_with_the_longest(items: list[pytest.Item]) -> None:
    """Lets files with much to wait for come first: workers share out files, and the longest is not to begin last."""

    def waits(item: pytest.Item) -> bool:
        is_cell = not isinstance(item, pytest.Function)
        return is_cell or item.get_closest_marker("slow") is not None

    slow = Counter(item.path for item in items if waits(item))
    items.sort(key=lambda item: -slow[item.path])


def pytest_collection_finish() -> None:
    """Lets nobody look for garbage in what stays until the end, libraries and tests, nor in a copy of it.

    That takes a third of a second each time, and a process that is forked would copy all its pages.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if item.get_closest_marker("process"):
        return (yield)
    with processes.forbidden():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Lets local peers of a notebook be forked from a copy of its kernel, as on Binder, where workers share the cores.

    The server that they come from else imports all once more, which takes as much CPU as a short notebook.
    """
    with pytest.MonkeyPatch.context() as of_kernel:
        if "PYTEST_XDIST_WORKER" in os.environ and not isinstance(item, pytest.Function):
            of_kernel.setenv(VARIABLE, "1")
        return (yield)


@pytest.fixture(autouse=True)
def interrupts_are_heard() -> None:
    """Lets all that a test starts take Ctrl-C.

    A shell lets what it runs in its background ignore it, and so does an averager of plain hivemind with the process
    that starts it: processes inherit that.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Shows what a program has said that a test ran, and that failed: its output was captured."""
    report = yield
    failed = call.excinfo and call.excinfo.value
    if isinstance(failed, subprocess.CalledProcessError | subprocess.TimeoutExpired):
        for name, said in (("stdout", failed.stdout), ("stderr", failed.stderr)):
            text = said.decode(errors="replace") if isinstance(said, bytes) else said
            report.sections += [(f"{name} of the program", text)] if text else []
    return report


@pytest.fixture(autouse=True, scope="module")
def no_children_left_by_file(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails the last test of a file that leaves a process behind, of a fixture for all or started after a test's end.

    Later tests would have to live with it: they count the processes that there are.
    """
    if any(item.path == request.path and item.get_closest_marker("process") for item in request.session.items):
        with processes.none_left():
            yield
    else:
        yield


@pytest.fixture(autouse=True)
def no_children_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a process behind."""
    if request.node.get_closest_marker("process") is None:
        yield
        return
    with processes.none_left():
        yield
    if len(os.listdir("/proc/self/fd")) > _MANY_DESCRIPTORS:
        gc.collect()


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Waits, with a bound, until something holds that another thread or process brings about."""

    def wait(condition: Callable[[], object], seconds: float = 20.0) -> None:
        end, pause = time.monotonic() + seconds, 0.02
        while not condition():
            assert time.monotonic() < end, f"did not happen within {seconds:.0f} s"
            time.sleep(pause)
            pause = min(1.2 * pause, 0.1)  # to look may take a while itself, such as at a long history

    return wait


@pytest.fixture
def swarm() -> Iterator[hivenb.Swarm]:
    """A swarm of this machine alone, for one test."""
    with hivenb.Swarm(f"test-{next(_numbers)}") as opened:
        yield opened
