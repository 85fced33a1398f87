"""Sockets are where their paths fit, whatever folder is named for temporary files."""

from __future__ import annotations

import multiprocessing as mp
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Listener
from pathlib import Path

import pytest

from hivenb.engine.process import socket_folder as module
from hivenb.engine.process.socket_folder import (
    LONGEST_FOLDER,
    LONGEST_PATH,
    place_sockets_of_multiprocessing,
    socket_folder,
    sockets_of_torch,
)
from hivenb.errors import PlatformError


@pytest.fixture(autouse=True)
def folder_of_multiprocessing() -> Iterator[None]:
    """What a test has it use is gone with the test."""
    config = mp.current_process()._config  # type: ignore[attr-defined]
    before = config.copy()
    yield
    config.clear()
    config.update(before)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path, which is pytest's own no more than that of a batch system."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
def folder_of(folder: Path) -> Callable[[int], Path]:
    """Makes a folder whose path has so many bytes."""

    def make(length: int) -> Path:
        made = folder / ("x" * (length - len(str(folder)) - 1))
        made.mkdir()
        return made

    return make


def use(monkeypatch: pytest.MonkeyPatch, usual: Path, *others: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(usual))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(module, "_ELSEWHERE", tuple(map(str, others)))


def test_a_short_folder_for_temporary_files_is_the_one_for_sockets(monkeypatch, folder_of):
    usual = folder_of(LONGEST_FOLDER)
    use(monkeypatch, usual, Path("/tmp"))
    assert socket_folder() == str(usual)
    assert os.listdir(usual) == []


def test_the_longest_name_fits_into_the_longest_folder(folder_of):
    name = f"hivemind-p2pclient-{'x' * 11}.sock"  # secrets.token_urlsafe(8)
    assert len(str(folder_of(LONGEST_FOLDER) / name)) == LONGEST_PATH


@pytest.mark.parametrize("runtime", [True, False])
def test_a_long_one_is_left_for_one_that_the_system_has(monkeypatch, folder_of, folder, runtime):
    use(monkeypatch, folder_of(LONGEST_FOLDER + 1), folder / "not-there", folder)
    own = folder / "own"
    own.mkdir()
    if runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(own))
    assert socket_folder() == str(own if runtime else folder)


def test_where_there_is_none_that_is_said_with_what_to_do(monkeypatch, folder_of, folder):
    usual = folder_of(90)
    use(monkeypatch, usual, folder / "not-there")
    with pytest.raises(PlatformError, match=rf"'{usual}'.* 90 bytes, and {LONGEST_FOLDER}.*export TMPDIR=/tmp"):
        socket_folder()


def test_where_no_temporary_file_can_be_made_that_is_said_with_what_to_do(monkeypatch, tmp_path):
    missing = str(tmp_path / "missing")
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [missing])
    monkeypatch.setenv("TMPDIR", missing)
    with pytest.raises(PlatformError, match=rf"TMPDIR='{missing}'.*export TMPDIR="):
        socket_folder()


@pytest.mark.process
@pytest.mark.parametrize("before", ["/before", None])
def test_programs_that_are_started_meanwhile_alone_have_another_folder(monkeypatch, folder_of, folder, before):
    use(monkeypatch, folder_of(90), folder)
    if before is None:
        monkeypatch.delenv("TMPDIR", raising=False)
    else:
        monkeypatch.setenv("TMPDIR", before)
    told = ["sh", "-c", "echo $TMPDIR"]
    with sockets_of_torch():
        assert subprocess.check_output(told, text=True).strip() == str(folder)
        assert os.environ.get("TMPDIR") == before
    assert subprocess.check_output(told, text=True).strip() == (before or "")
    assert tempfile.gettempdir() != str(folder)


@pytest.fixture
def no_folder_yet(monkeypatch) -> None:
    """multiprocessing has no folder, as in a process that has just begun."""
    monkeypatch.delitem(mp.current_process()._config, "tempdir", raising=False)


@pytest.mark.usefixtures("no_folder_yet")
def test_multiprocessing_listens_where_its_paths_fit(monkeypatch, folder_of, folder):
    use(monkeypatch, folder_of(90), folder)
    place_sockets_of_multiprocessing()
    with Listener(family="AF_UNIX") as listener:
        assert os.path.dirname(os.path.dirname(listener.address)) == str(folder)
    there = dict(mp.current_process()._config)
    place_sockets_of_multiprocessing()
    assert mp.current_process()._config == there, "one folder for each process"


@pytest.mark.usefixtures("no_folder_yet")
def test_multiprocessing_keeps_to_its_folder_where_that_is_short(monkeypatch, folder):
    use(monkeypatch, folder, Path("/tmp"))
    place_sockets_of_multiprocessing()
    assert "tempdir" not in mp.current_process()._config


TRAINS = """
import os, sys, tempfile, hivenb, tiny
def main():
    with hivenb.Swarm() as swarm:
        options = hivenb.Options(target_batch_size=64)
        run = hivenb.TrainingRun(tiny.TinyModel(), tiny.loader(), swarm=swarm, accelerator="cpu", options=options)
        swarm.add_local_peers(1, run)
        run.start()
        assert run.wait(epochs=2, timeout=120)
    print(tempfile.gettempdir(), os.environ["TMPDIR"])
if __name__ == "__main__":
    main()
"""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("length", [pytest.param(75, marks=pytest.mark.long), 200])
def test_two_peers_train_with_a_long_folder_for_temporary_files(folder_of, folder, tmp_path, length):
    long = folder_of(length)
    script = tmp_path / "script.py"
    script.write_text(TRAINS)
    environment = {"PYTHONPATH": ":".join(sys.path), "TMPDIR": str(long), "PATH": "", "XDG_RUNTIME_DIR": str(folder)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=180, env=environment)
    assert (done.returncode, done.stdout) == (0, f"{long} {long}\n"), done.stderr
    assert [path for path in folder.iterdir() if path != long] == [], "sockets are left behind"
