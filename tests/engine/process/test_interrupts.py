"""An interrupt wakes the main thread, whatever the others are doing, and waits for what is done as a whole."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
import time
from types import FrameType

import pytest
from interrupts import interruptible_thread

from hivenb.engine.process.interrupts import BackgroundThread, interrupts_blocked

#: Threads that start threads look at their signals all the time. Without holding SIGINT back, they take about one
#: interrupt in ten from a main thread that sleeps.
PROGRAM = """
import os, signal, threading, time
from hivenb.engine.process.interrupts import BackgroundThread

def start_threads():
    while True:
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()

for number in range(2):
    BackgroundThread(target=start_threads, name=f"starts-{number}").start()
woken = 0
while woken < 60:
    begun = time.monotonic()
    try:
        print("asleep", flush=True)
        time.sleep(10)
    except KeyboardInterrupt:
        assert time.monotonic() - begun < 9, f"slept on after interrupt {woken}"
        woken += 1
print("woken", flush=True)
os._exit(0)
"""


@pytest.mark.process
def test_no_interrupt_is_taken_by_a_background_thread_or_one_that_it_has_started():
    program = subprocess.Popen([sys.executable, "-c", textwrap.dedent(PROGRAM)], stdout=subprocess.PIPE, text=True)
    with program:
        for line in program.stdout:
            if line == "asleep\n":
                time.sleep(0.05)  # until it is
                program.send_signal(signal.SIGINT)
    assert line == "woken\n"
    assert program.returncode == 0


def test_it_is_a_daemon_that_does_as_told_and_leaves_its_starter_as_it_was():
    seen = []
    thread = BackgroundThread(
        target=lambda word: seen.append((word, signal.pthread_sigmask(signal.SIG_BLOCK, []))), name="seen", args=["it"]
    )
    thread.start()
    thread.join()
    assert seen == [("it", {signal.SIGINT})]
    assert thread.daemon
    assert thread.name == "seen"
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert thread not in threading.enumerate()


def test_one_that_another_thread_takes_waits_for_the_end_of_the_block() -> None:
    before, done = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with interrupts_blocked():
            interrupt()
            done.append("all of it")
        done.append("and more")

    with interruptible_thread() as interrupt, pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_several_in_blocks_within_blocks_are_dealt_with_once_at_the_outermost_end() -> None:
    seen = []

    def handler(number: int, frame: FrameType | None) -> None:
        assert frame is not None
        seen.append(signal.Signals(number).name)

    signal.signal(signal.SIGINT, handler)
    with interruptible_thread() as interrupt:
        with interrupts_blocked():
            interrupt()
            with interrupts_blocked():
                interrupt()
            interrupt()
            assert seen == []
        assert seen == ["SIGINT"]
        interrupt()
    assert seen == ["SIGINT"] * 2


def test_one_that_comes_with_an_error_does_not_hide_it() -> None:
    def fail() -> None:
        with interrupts_blocked():
            interrupt()
            raise ValueError("the error")

    with interruptible_thread() as interrupt, pytest.raises(KeyboardInterrupt) as raised:
        fail()
    assert repr(raised.value.__context__) == "ValueError('the error')"


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL, signal.default_int_handler])
def test_who_handles_interrupts_is_as_before(handler: signal.Handlers) -> None:
    signal.signal(signal.SIGINT, handler)
    with interrupts_blocked():
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert signal.getsignal(signal.SIGINT) is handler
    with interrupts_blocked():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN, "somebody has set it meanwhile"
