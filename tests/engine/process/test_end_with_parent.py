"""Children never outlive their parent, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest

from hivenb.engine.process.child import tied_to_parent
from hivenb.engine.process.known_process import wait_for_exit

pytestmark = pytest.mark.process

PREAMBLE = (
    "import os, sys, time, multiprocessing as mp, subprocess\n"
    "from hivenb.engine.process import child as child_process\n"
)


@pytest.fixture
def parent() -> Iterator[Callable[[str], tuple[subprocess.Popen[str], int]]]:
    """Runs a script that prints the id of a child it has started, and then stays."""
    started: list[subprocess.Popen[str]] = []

    def start(script: str) -> tuple[subprocess.Popen[str], int]:
        process = subprocess.Popen([sys.executable, "-c", PREAMBLE + script], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        return process, int(process.stdout.readline())

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_child_ends_with_its_parent(parent: Callable[[str], tuple[subprocess.Popen[str], int]]) -> None:
    process, child = parent(
        "class Child(child_process.ChildProcess, mp.Process): pass\n"
        "child = Child(target=time.sleep, args=(600,))\n"
        "child.start()\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    assert not wait_for_exit(child, 0.5), "it ended by itself"
    process.kill()
    assert wait_for_exit(child, 10)


def test_a_program_that_is_not_ours_is_in_a_session_of_its_own_and_ends_with_its_parent(
    parent: Callable[[str], tuple[subprocess.Popen[str], int]], eventually: Callable[..., None]
) -> None:
    process, child = parent(
        "child = subprocess.Popen(child_process.tied_to_parent(['/bin/sleep', '600']))\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
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
