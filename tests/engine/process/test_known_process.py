"""A process is waited for and killed as the one that it is, and not by a number that may be another's by now."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator

import psutil
import pytest

from hivenb.engine.process.known_process import KnownProcess, wait_for_exit

pytestmark = pytest.mark.process


@pytest.fixture(params=["pidfd", "polling"], autouse=True)
def means(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "polling":

        def refuse(pid: int) -> int:
            raise OSError(38, "Function not implemented")

        monkeypatch.setattr(os, "pidfd_open", refuse)
    return str(request.param)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen(["/bin/sleep", "600"])
    yield started
    started.kill()
    started.wait()


def test_of_one_that_ends(process: subprocess.Popen[bytes]) -> None:
    assert not wait_for_exit(process.pid, 0.05)
    assert not wait_for_exit(process.pid, 0)
    timer = threading.Timer(0.1, lambda: (process.kill(), process.wait()))
    timer.start()
    assert wait_for_exit(process.pid, 20)
    timer.join()
    assert wait_for_exit(process.pid), "it has ended, so there is nothing to wait for"


def test_one_whose_end_nobody_has_asked_for_has_ended(process: subprocess.Popen[bytes]) -> None:
    known = KnownProcess(process.pid)
    known.kill()
    assert known.wait(20)
    assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE


def test_another_one_of_the_same_number_is_not_killed(
    means: str, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = subprocess.Popen(["/bin/sleep", "600"])
    known = KnownProcess(gone.pid)
    gone.kill()
    gone.wait()
    if means == "polling":  # as if the system had given its number away
        assert known._process is not None
        monkeypatch.setattr(known._process, "_pid", process.pid)
    known.pid = process.pid
    known.kill()
    assert known.wait(0)
    assert process.poll() is None


def test_its_descriptor_is_given_back(process: subprocess.Popen[bytes]) -> None:
    before = psutil.Process().num_fds()
    known = [KnownProcess(process.pid) for _ in range(5)]
    assert not any(one.wait(0) for one in known)
    del known
    assert psutil.Process().num_fds() == before
