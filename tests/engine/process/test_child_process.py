"""Children are deaf to interrupts, and none dies with a lock that all share."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import forked
import psutil
import pytest
from hivemind.utils.mpfuture import MPFuture, SharedBytes

from hivenb._interrupts import interrupts_blocked
from hivenb.engine.process import child as child_process
from hivenb.engine.process.child import ChildProcess

pytestmark = pytest.mark.process


class Child(ChildProcess, mp.Process):
    """A process in the way hivemind's are settled."""


def report_and_wait(connection: Connection) -> None:
    connection.send((signal.getsignal(signal.SIGINT) == signal.SIG_IGN, os.getpid()))
    connection.recv()


def hold_a_lock_most_of_the_time(connection: Connection) -> None:
    while True:
        with SharedBytes._lock:
            connection.send("mine")
            time.sleep(0.1)


class Circle:
    """What only a look for garbage finds."""

    alive = 0

    def __init__(self) -> None:
        self.itself = self
        Circle.alive += 1

    def __del__(self) -> None:
        Circle.alive -= 1


def make_garbage(connection: Connection) -> None:
    young: deque[Circle] = deque(maxlen=2000)  # a quarter of them live for long enough to be taken for old ones
    most = 0
    for _ in range(1_000_000):
        young.append(Circle())
        most = max(most, Circle.alive)
    connection.send(most)


def test_a_child_finds_its_own_garbage_however_much_its_parent_has() -> None:
    ballast = [[] for _ in range(2_000_000)]
    gc.collect()  # so that Python expects as much of those to come
    ours, theirs = mp.Pipe()
    child = Child(target=make_garbage, args=(theirs,), daemon=True)
    child.start()
    assert ours.poll(60)
    assert ours.recv() < 100_000, "of 250,000 that would be there at the end"
    child.join(10)
    del ballast


def count_frozen(connection: Connection) -> None:
    connection.send(gc.get_freeze_count())


def test_memory_stays_shared_with_a_child_and_with_whom_its_parent_was_forked_from() -> None:
    gc.freeze()  # as the server does that local peers are forked from
    try:
        before = gc.get_freeze_count()
        ours, theirs = mp.Pipe()
        child = Child(target=count_frozen, args=(theirs,), daemon=True)
        child.start()
        assert ours.poll(60)
        assert ours.recv() > 0.99 * before, "a child that looks through its parent's objects copies them"
        child.join(10)
        assert gc.get_freeze_count() == before, "neither may its parent look through those of whom it was forked from"
    finally:
        gc.unfreeze()


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
            child_process.settle_as_child()
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def start_one_while_the_input_is_read(given: Connection, told: Connection) -> None:
    os.dup2(given.fileno(), 0)
    os.dup2(told.fileno(), 1)
    given.close()
    told.close()
    sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115 - as long as the process

    def read() -> None:
        sys.stdin.readline()
        began.set()
        sys.stdin.read()

    began = threading.Event()
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    began.wait()
    while Path(f"/proc/self/task/{reader.native_id}/stat").read_text().rpartition(")")[2].split()[0] != "S":
        pass
    child = Child(target=lambda: print(repr(sys.stdin.read()), os.read(0, 9), flush=True))
    child.start()
    child.join(20)
    print(child.exitcode, flush=True)
    child.kill()


def test_a_child_starts_while_a_thread_of_its_parent_reads_the_input() -> None:
    """multiprocessing closes it in the child, and waited for ever for that thread, which is in the parent alone."""
    (given, giving), (hearing, told) = mp.Pipe(duplex=False), mp.Pipe(duplex=False)
    program = forked.start(start_one_while_the_input_is_read, given, told)
    given.close()
    told.close()
    os.write(giving.fileno(), b"a line\n")
    with open(hearing.fileno(), closefd=False) as said:
        lines = [said.readline(), said.readline()]
    giving.close()
    hearing.close()
    program.join(20)
    program.kill()
    assert lines == ["'' b''\n", "0\n"], "the child has nothing to read, and nor has a program that it starts"


def begin_to_answer() -> None:
    def is_blocked(status: str) -> bool:
        (mask,) = (line.split()[1] for line in Path(status).read_text().splitlines() if line.startswith("SigBlk"))
        return bool(int(mask, 16) >> signal.SIGINT - 1 & 1)

    Child()
    (manager,) = psutil.Process().children()
    assert manager.name() == "torch_shm_manager"
    answers = MPFuture._pipe_waiter_thread
    assert answers is not None
    assert is_blocked(f"/proc/{manager.pid}/status")
    assert is_blocked(f"/proc/self/task/{answers.native_id}/status")


def test_what_answers_need_is_out_of_reach_of_interrupts_as_it_starts() -> None:
    done = forked.run(begin_to_answer)
    assert done.code == 0, done.err
