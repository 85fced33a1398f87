"""What is missing on a machine is said in our words, with what to do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.slow]

OPENS = """
import hivenb
try:
    hivenb.Swarm().close()
except hivenb.HivenbError as e:
    print(type(e).__name__, e)
else:
    print("open")
"""

REMOUNT = """
import subprocess
subprocess.run(["mount", "-o", "remount,{}", "/dev/shm"], check=True)
"""

TRAINS = """
import os, tempfile, hivenb, tiny
folder = tempfile.gettempdir()
def fill():
    try:
        with open(os.path.join(folder, "filling"), "wb", 0) as file:
            while file.write(bytes(4096)):
                pass
    except OSError as e:
        assert e.errno == 28
    assert os.statvfs(folder).f_bavail == 0
with hivenb.Swarm() as swarm:
    options = hivenb.Options(target_batch_size=64)
    run = hivenb.TrainingRun(tiny.TinyModel(), tiny.loader(), swarm=swarm, accelerator="cpu", options=options)
    run.start()
    assert run.wait(epochs=2, timeout=120)
    fill()
    run.stop()
    print(type(run.exception).__name__, run.exception)
fill()
try:
    hivenb.Swarm("another")
except hivenb.HivenbError as e:
    print(type(e).__name__, e)
"""


def said(code: str, tmp_path: Path, mounts: str = "", **environment: str) -> str:
    """What a program prints in a file system of its own, which root alone can make."""
    script = tmp_path / "script.py"
    script.write_text(code)
    command = [sys.executable, str(script)]
    if mounts:
        if os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
            pytest.skip("a file system of one's own needs root and unshare")
        command = ["unshare", "-m", "sh", "-ec", f'{mounts}\nexec "$@"', "sh", *command]
    environment = {"PYTHONPATH": ":".join(sys.path), "PATH": os.environ["PATH"]} | environment
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_shared_memory_that_is_none_is_said_and_what_is_said_helps(tmp_path):
    """As a person would try again, in one kernel. Its folders are read-only, and nobody needs them."""
    folder = tmp_path / "read-only"
    folder.mkdir()
    mounts = f"mount -t tmpfs -o ro none /dev/shm\nmount -t tmpfs -o ro none {folder}"
    told = said(
        f"{OPENS}{REMOUNT.format('rw,size=16k')}{OPENS}{REMOUNT.format('size=2g')}{OPENS}",
        tmp_path,
        mounts,
        HOME=str(folder),
        TMPDIR=str(folder),
    )
    locks, memory, opened = told.splitlines()
    assert re.search(r"^PlatformError .*cannot share locks.*it is read-only.*mount -t tmpfs", locks), locks
    assert re.search(r"^PlatformError .*cannot share memory in /dev/shm: it has .*--shm-size=2g", memory), memory
    assert opened == "open"


def test_a_disk_that_is_full_while_a_run_trains(tmp_path):
    """In a process that has no ``HOME``."""
    folder = tmp_path / "full"
    folder.mkdir()
    told = said(TRAINS, tmp_path, f"mount -t tmpfs -o size=400k none {folder}", TMPDIR=str(folder)).splitlines()
    assert told[0].startswith(f"TrainingError the disk is full at {folder}/hivenb-run-")
    assert "run.model" in told[0]
    assert told[1].startswith(f"PlatformError the disk is full at {folder}, where")


def test_a_working_directory_that_was_deleted(tmp_path):
    """Whose process has folders that are not there, either, but nobody needs those."""
    gone, missing = tmp_path / "gone", str(tmp_path / "missing")
    code = f"import os\nos.mkdir({str(gone)!r})\nos.chdir({str(gone)!r})\nos.rmdir({str(gone)!r})\n"
    told = said(f"{code}{OPENS}\nos.chdir({str(tmp_path)!r})\n{OPENS}", tmp_path, HOME=missing, TMPDIR=missing)
    refused, opened = told.splitlines()
    assert refused.startswith("PlatformError the working directory of this process has been deleted")
    assert "%cd ~" in refused
    assert opened == "open"
