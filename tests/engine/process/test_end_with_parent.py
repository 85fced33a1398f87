"""Children never outlive their parent, however it ends."""

from __future__ import annotations

import multiprocessing as mp
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import forked
import psutil
import pytest

from hivenb.engine.process.child import ChildProcess, tied_to_parent
from hivenb.engine.process.known_process import wait_for_exit

pytestmark = pytest.mark.process


class Child(ChildProcess, mp.Process):
    """A process in the way hivemind's are settled."""


def have_a_child(told: Connection) -> None:
    child = Child(target=time.sleep, args=(600,))
    child.start()
    told.send(child.pid)
    time.sleep(600)


def have_a_program(told: Connection) -> None:
    program = subprocess.Popen(tied_to_parent(["/bin/sleep", "600"]))
    told.send(program.pid)
    time.sleep(600)


@pytest.fixture
def parent() -> Iterator[Callable[[Callable[[Connection], None]], tuple[BaseProcess, int]]]:
    """Runs what tells the id of a child that it has started, and then stays."""
    started: list[BaseProcess] = []

    def start(target: Callable[[Connection], None]) -> tuple[BaseProcess, int]:
        here, there = mp.Pipe()
        started.append(forked.start(target, there))
        assert here.poll(60)
        return started[-1], here.recv()

    yield start
    for process in started:
        process.kill()
        process.join()


def test_a_child_ends_with_its_parent(parent: Any) -> None:
    process, child = parent(have_a_child)
    assert not wait_for_exit(child, 0.5), "it ended by itself"
    process.kill()
    assert wait_for_exit(child, 10)


def test_a_program_that_is_not_ours_is_in_a_session_of_its_own_and_ends_with_its_parent(
    parent: Any, eventually: Callable[..., None]
) -> None:
    process, child = parent(have_a_program)
    eventually(lambda: psutil.Process(child).cmdline() == ["/bin/sleep", "600"])
    assert os.getsid(child) == child != os.getsid(process.pid)
    process.kill()
    assert wait_for_exit(child, 10)


def test_a_program_whose_parent_is_gone_already_does_not_start() -> None:
    command = tied_to_parent(["/bin/sleep", "600"])
    gone = subprocess.Popen(["/bin/true"])
    gone.wait()
    command[command.index(str(os.getpid()))] = str(gone.pid)
    assert subprocess.run(command, timeout=20).returncode == 1


def test_a_program_gets_its_arguments_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIVENB_TEST", "a value")
    script = 'echo "$0|$1|$HIVENB_TEST|$HIVENB_SETTING"'
    command = tied_to_parent(["/bin/sh", "-c", script, "x y", "--flag"], "HIVENB_SETTING=as=told OTHER=1")
    assert subprocess.run(command, capture_output=True, text=True, timeout=20).stdout == "x y|--flag|a value|as=told\n"
