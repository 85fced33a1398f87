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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("ro", r"cannot share locks.*it is read-only.*mount -t tmpfs"),
        ("size=16k", r"cannot share memory in /dev/shm: it has .*--shm-size=2g"),
    ],
)
def test_a_shared_memory_that_is_none(tmp_path, options, words):
    told = said(OPENS, tmp_path, f"mount -t tmpfs -o {options} none /dev/shm")
    assert told.startswith("PlatformError ")
    assert re.search(words, told), told


def test_a_disk_that_is_full_while_a_run_trains(tmp_path):
    folder = tmp_path / "full"
    folder.mkdir()
    told = said(TRAINS, tmp_path, f"mount -t tmpfs -o size=400k none {folder}", TMPDIR=str(folder)).splitlines()
    assert told[0].startswith(f"TrainingError the disk is full at {folder}/hivenb-run-")
    assert "run.model" in told[0]
    assert told[1].startswith(f"PlatformError the disk is full at {folder}, where")


def test_a_working_directory_that_was_deleted(tmp_path):
    gone = tmp_path / "gone"
    code = f"import os\nos.mkdir({str(gone)!r})\nos.chdir({str(gone)!r})\nos.rmdir({str(gone)!r})\n"
    told = said(code + OPENS, tmp_path)
    assert told.startswith("PlatformError the working directory of this process has been deleted")
    assert "%cd ~" in told


def test_folders_that_nobody_needs_are_not_named(tmp_path):
    assert said(OPENS, tmp_path) == "open\n"


def test_folders_that_nobody_needs_are_missing(tmp_path):
    missing = dict.fromkeys(("HOME", "TMPDIR"), str(tmp_path / "missing"))
    assert said(OPENS, tmp_path, **missing) == "open\n"


def test_folders_that_nobody_needs_are_read_only(tmp_path):
    folder = tmp_path / "read-only"
    folder.mkdir()
    mounts = f"mount -t tmpfs -o ro none {folder}"
    assert said(OPENS, tmp_path, mounts, HOME=str(folder), TMPDIR=str(folder)) == "open\n"
