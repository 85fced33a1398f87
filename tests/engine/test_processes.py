"""Children are deaf to interrupts and never outlive their parent."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler

import psutil
import pytest
from hivemind.utils.mpfuture import MPFuture, SharedBytes

from hivenb.engine import processes
from hivenb.engine.processes import SettledProcess, interrupts_blocked, tied_to_parent, wait_for_exit

PREAMBLE = "import os, sys, time, multiprocessing as mp, subprocess\nfrom hivenb.engine import processes\n"


class Child(SettledProcess, mp.Process):
    """A process in the way hivemind's are processes."""


def report_and_wait(connection: Connection) -> None:
    connection.send((signal.getsignal(signal.SIGINT) == signal.SIG_IGN, os.getpid()))
    connection.recv()


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


def hold_a_lock_most_of_the_time(connection: Connection) -> None:
    while True:
        with SharedBytes._lock:
            connection.send("mine")
            time.sleep(0.1)


@pytest.mark.parametrize("end", [Child.kill, Child.terminate])
def test_a_child_that_is_ended_by_force_takes_no_lock_along(end: Callable[[Child], None]) -> None:
    ours, theirs = mp.Pipe()
    child = Child(target=hold_a_lock_most_of_the_time, args=(theirs,), daemon=True)
    child.start()
    ours.recv()
    end(child)
    assert not child.is_alive()
    assert MPFuture().cancel()


@pytest.mark.parametrize("on_main_thread", [True, False])
def test_a_child_ignores_interrupts_and_its_parent_does_not(on_main_thread: bool) -> None:
    before = signal.getsignal(signal.SIGINT)
    ours, theirs = mp.Pipe()
    child = Child(target=report_and_wait, args=(theirs,), daemon=True)
    if on_main_thread:
        child.start()
    else:
        thread = threading.Thread(target=child.start)
        thread.start()
        thread.join(30)  # it goes on living when the thread that started it has ended
    assert ours.poll(20), "the child said nothing"
    ignores, pid = ours.recv()
    assert ignores
    assert pid == child.pid
    os.kill(pid, signal.SIGINT)
    ours.send("end")
    child.join(20)
    assert child.exitcode == 0, "the interrupt hit it"
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.parametrize("default", ["spawn", "forkserver"])
def test_a_child_is_a_full_member_whatever_the_default_start_method_is(default: str) -> None:
    """Above all it hands out descriptors in its own name, as messages to the DHT need."""
    kept = mp.get_start_method()
    mp.set_start_method(default, force=True)
    try:
        ForkingPickler.dumps(mp.Pipe()[0])  # from now on this process has such a name
        ours, theirs = mp.Pipe()
        listening, speaking = mp.Pipe()

        def hand_out() -> None:  # cannot be pickled, so it has to be forked
            theirs.send(listening)
            theirs.recv()

        child = Child(target=hand_out, daemon=True)
        child.start()
        try:
            assert ours.poll(20)
            received = ours.recv()
            speaking.send("hello")
            assert received.poll(20)
            assert received.recv() == "hello"
            ours.send("end")
        finally:
            child.join(20)
    finally:
        mp.set_start_method(kept, force=True)


def test_an_interrupt_that_comes_before_the_child_is_settled_does_not_hit_it() -> None:
    with interrupts_blocked():
        pid = os.fork()
        if pid == 0:
            os.kill(os.getpid(), signal.SIGINT)  # held back, and dropped when it is to be ignored
            processes.settle_as_child()
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_a_child_ends_with_its_parent(parent: Callable[[str], tuple[subprocess.Popen[str], int]]) -> None:
    process, child = parent(
        "class Child(processes.SettledProcess, mp.Process): pass\n"
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
        "child = subprocess.Popen(processes.tied_to_parent(['/bin/sleep', '600']))\n"
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
    command = tied_to_parent(["/bin/sh", "-c", 'echo "$0|$1|$HIVENB_TEST"', "x y", "--flag"])
    assert subprocess.run(command, capture_output=True, text=True, timeout=20).stdout == "x y|--flag|a value\n"


class TestWaitForExit:
    @pytest.fixture(params=["pidfd", "polling"], autouse=True)
    def without_pidfd(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        if request.param == "polling":

            def refuse(pid: int) -> int:
                raise OSError(38, "Function not implemented") if processes._exists(pid) else ProcessLookupError()

            monkeypatch.setattr(os, "pidfd_open", refuse)

    def test_of_one_that_ends(self) -> None:
        process = subprocess.Popen(["/bin/sleep", "600"])
        assert not wait_for_exit(process.pid, 0.05)
        assert not wait_for_exit(process.pid, 0)
        timer = threading.Timer(0.1, lambda: (process.kill(), process.wait()))
        timer.start()
        assert wait_for_exit(process.pid, 20)
        timer.join()
        assert wait_for_exit(process.pid), "it has ended, so there is nothing to wait for"
