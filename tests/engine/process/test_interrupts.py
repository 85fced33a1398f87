"""An interrupt wakes the main thread, whatever the others are doing."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from hivenb.engine.process.interrupts import BackgroundThread

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
while woken < 40:
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
