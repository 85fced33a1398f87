"""An interrupt ends a program while it loads, whatever the modules make of it that are imported just then."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from hivenb.app.loading import INTERRUPTED, loading

_PROGRAM = """
import os, signal
from hivenb.app.loading import loading

with loading():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        print("not interrupted")
    except BaseException:  # as a module does that can do without another one
        print("goes on")
"""


@pytest.mark.process
def test_nobody_can_take_an_interrupt_for_something_else() -> None:
    told = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=60)
    assert (told.returncode, told.stdout, told.stderr) == (INTERRUPTED, "", "\nhivenb: interrupted\n")


def test_interrupts_are_as_before_afterwards() -> None:
    before = signal.getsignal(signal.SIGINT)
    with loading():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
