"""The process that local peers are forked from is deaf to interrupts, and those who wait for it are not."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import pathlib, signal
from multiprocessing import forkserver
from hivenb.peers.forking import start_server

start_server()
status = pathlib.Path(f"/proc/{forkserver._forkserver._forkserver_pid}/status").read_text()
blocked = int(status.split("SigBlk:")[1].split()[0], 16)
print(bool(blocked >> signal.SIGINT - 1 & 1))
"""


@pytest.mark.process
def test_an_interrupt_does_not_hit_its_imports() -> None:
    told = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=60)
    assert (told.stdout, told.stderr) == ("True\n", "")


_WAITING = """
import os, signal, threading
import psutil
from multiprocessing import forkserver
from hivenb.peers.forking import start_server, wait_for_server

start_server()
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
def test_an_interrupt_ends_the_wait_for_its_imports_and_it_can_be_waited_for_again() -> None:
    told = subprocess.run([sys.executable, "-c", _WAITING], capture_output=True, text=True, timeout=150)
    assert (told.stdout, told.stderr) == ("interrupted\n[]\n", "")
