"""The process that local peers are forked from is deaf to interrupts, and those who wait for it are not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hivenb.peers.fork_server import VARIABLE

is_a_copy = pytest.mark.parametrize("is_a_copy", [False, True], ids=["on its own", "a copy"])


def told_by(program: str, is_a_copy: bool) -> tuple[str, str]:
    """What a program prints, and what it prints as errors."""
    environment = {**os.environ, VARIABLE: str(int(is_a_copy))}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=150, env=environment, check=False
    )
    return done.stdout, done.stderr


_PROGRAM = """
import os, pathlib, signal, threading
import psutil
from multiprocessing import forkserver
from hivenb.peers.fork_server import start_server, wait_for_server

start_server()
status = pathlib.Path(f"/proc/{forkserver._forkserver._forkserver_pid}/status").read_text()
blocked = int(status.split("SigBlk:")[1].split()[0], 16)
print("blocked", bool(blocked >> signal.SIGINT - 1 & 1))
server = psutil.Process(forkserver._forkserver._forkserver_pid)
server.suspend()
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    wait_for_server()
except KeyboardInterrupt:
    print("interrupted")
server.resume()
wait_for_server()
print(psutil.wait_procs(server.children(), timeout=60)[1])
"""


@pytest.mark.process
@pytest.mark.slow
@is_a_copy
def test_an_interrupt_does_not_hit_its_imports_and_ends_the_wait_for_them(is_a_copy: bool) -> None:
    """And they can be waited for again."""
    assert told_by(_PROGRAM, is_a_copy) == ("blocked True\ninterrupted\n[]\n", "")
