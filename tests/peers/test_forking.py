"""The process that local peers are forked from is deaf to interrupts, from its first instruction on."""

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
