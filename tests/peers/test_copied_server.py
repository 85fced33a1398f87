"""The copy of a kernel that local peers are forked from; `tests/kernel/test_memory.py` measures what it is good for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from hivenb.peers import fork_server


@pytest.mark.parametrize(("value", "expected"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_a_copy_is_made_of_who_asks_for_it(monkeypatch: pytest.MonkeyPatch, value: str | None, expected: bool) -> None:
    monkeypatch.delenv(fork_server.VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(fork_server.VARIABLE, value)
    assert fork_server.is_wanted() is expected


def test_who_uses_a_gpu_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fork_server.VARIABLE, "1")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert not fork_server.is_wanted()


_PROGRAM = """
import os, select
from multiprocessing import forkserver
import psutil
from hivenb.peers.fork_server import wait_for_server
from hivenb.system.process_tree import descendants, own_descendants

ours, theirs = os.pipe()
wait_for_server()
server = psutil.Process(forkserver._forkserver._forkserver_pid)
print(server.cmdline() == psutil.Process().cmdline())
print("helpers apart:", sorted(descendants()), sorted(own_descendants()))
os.close(theirs)
print("end of the pipe:", select.select([ours], [], [], 0)[0] == [ours] and os.read(ours, 1) == b"")
os.close(forkserver._forkserver._forkserver_alive_fd)
print("ended with those it serves:", server.wait(30))
"""


@pytest.mark.process
@pytest.mark.slow
def test_a_copy_is_a_helper_that_holds_nothing_and_ends_with_those_it_serves() -> None:
    told = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, fork_server.VARIABLE: "1"},
    )
    assert told.stderr == ""
    assert told.stdout.splitlines() == [
        "True",
        "helpers apart: [] []",
        "end of the pipe: True",
        "ended with those it serves: 0",
    ]
