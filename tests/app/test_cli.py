from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import multiprocessing as mp
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TextIO

import forked
import psutil
import pytest
import tiny
import torch

import hivenb
from hivenb.app import cli, demo
from hivenb.app.lab import open_lab, own_copy
from hivenb.errors import HivenbError, MissingDependencyError
from hivenb.peers.fork_server import VARIABLE
from hivenb.run import wait_output
from hivenb.tasks import TASKS, DigitsModel, Task, digits
from hivenb.view.terminal import Terminal

ROOT = Path(__file__).resolve().parents[2]
HIVENB = [sys.executable, "-m", "hivenb"]
# the package may be imported from the checkout, while the command runs elsewhere
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


class Command:
    """A command in a session of its own, whose output is read as it comes."""

    def __init__(self, process: subprocess.Popen[str] | BaseProcess, output: TextIO):
        self.process = process
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._ended = False
        threading.Thread(target=self._read, args=(output,), daemon=True).start()

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_for(self, pattern: str, timeout: float) -> re.Match[str]:
        """Wait until the output holds this."""
        with self._news:
            self._news.wait_for(lambda: self._ended or re.search(pattern, self.output), timeout)
        found = re.search(pattern, self.output)
        assert found, f"no {pattern!r} within {timeout:.0f} s in:\n{self.output}"
        return found

    def wait(self, timeout: float) -> int:
        with self._news:
            assert self._news.wait_for(lambda: self._ended, timeout), f"still running:\n{self.output}"
        return self._exit_code(timeout)

    def interrupt(self) -> None:
        """What Ctrl-C in a terminal does: a signal to all processes of the foreground."""
        os.killpg(self.process.pid, signal.SIGINT)

    def family(self) -> list[psutil.Process]:
        return [*psutil.Process(self.process.pid).children(recursive=True)]

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # it may have had no session of its own yet
        self._exit_code(10)

    def _exit_code(self, timeout: float) -> int | None:
        if isinstance(self.process, subprocess.Popen):
            return self.process.wait(timeout)
        self.process.join(timeout)
        return self.process.exitcode

    def _read(self, output: TextIO) -> None:
        with output:
            for line in output:
                with self._news:
                    self.lines.append(line)
                    self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()


@contextlib.contextmanager
def running(arguments: list[str], folder: Path, env: dict[str, str] | None = None) -> Iterator[Command]:
    process = subprocess.Popen(
        arguments,
        cwd=folder,
        env=env or ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    command = Command(process, process.stdout)
    try:
        yield command
    finally:
        command.end()


@contextlib.contextmanager
def running_forked(arguments: list[str], folder: Path, env: dict[str, str] | None = None) -> Iterator[Command]:
    """``hivenb`` with these arguments, in a process forked from one that has imported all; an interpreter does so anew.

    Its digits are unhurried ones.
    """
    here, there = mp.Pipe(duplex=False)
    process = forked.start(_run_command, there, arguments, str(folder), env or {})
    there.close()
    with here:
        command = Command(process, open(os.dup(here.fileno())))  # noqa: SIM115 - by its reader, at its end
    try:
        yield command
    finally:
        command.end()


def _run_command(output: Connection, arguments: list[str], folder: str, env: dict[str, str]) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ.update(env)
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    output.close()
    sys.stdout, sys.stderr = open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115 - to its end
    TASKS["digits"] = unhurried_digits
    sys.exit(cli.main(arguments))


def gone(processes: list[psutil.Process], timeout: float) -> bool:
    return not psutil.wait_procs(processes, timeout)[1]


class UnhurriedDigits(DigitsModel):
    """Leaves the cores to whoever joins meanwhile."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.05)
        return super().training_step(batch, batch_idx)


def unhurried_digits() -> Task:
    return dataclasses.replace(digits(), model=UnhurriedDigits(hidden=8, blocks=1))


@pytest.fixture
def threads_of_torch() -> Iterator[None]:
    """As many afterwards as before: the command takes one."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.process
@pytest.mark.slow
def test_the_demo_trains_with_two_peers_and_leaves_figures_and_a_picture(tmp_path):
    started = time.monotonic()
    arguments = ["demo", "--epochs", "5", "--json", "out.json", "--png", "out.png"]
    with running([*HIVENB, *arguments], tmp_path) as demo:
        assert demo.wait(150) == 0, demo.output
    seconds = time.monotonic() - started

    figures = json.loads((tmp_path / "out.json").read_text())
    assert figures["task"] == "digits"
    assert figures["peers_max"] == 3
    assert figures["epochs"] >= 5
    assert figures["loss_last"] < figures["loss_first"]
    assert 0.3 < figures["accuracy"] <= 1.0
    assert figures["children_left"] == 0
    assert seconds - 15 < figures["wall_seconds"] < seconds
    assert sum(figures["phases"].values()) == pytest.approx(figures["wall_seconds"], abs=0.5)
    assert figures["versions"]["hivenb"] == hivenb.__version__
    assert {"python", "hivemind", "lightning", "torch"} < figures["versions"].keys()
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert f"hivenb {hivenb.__version__}: digits" in demo.output
    assert "3 peers" in demo.output
    assert "Validation accuracy" in demo.output
    assert "all peers have ended" in demo.output
    assert "Traceback" not in demo.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "out.png"]


@pytest.mark.process
@pytest.mark.slow
def test_others_join_the_demo_and_ctrl_c_ends_it(tmp_path, capsys, threads_of_torch, monkeypatch):
    monkeypatch.setitem(TASKS, "digits", unhurried_digits)
    # its peer is forked from a copy; those of the demo above, from a server, which imports all once more
    arguments, env = ["demo", "--peers", "1", "--epochs", "100000", "--png", "out.png"], {VARIABLE: "1"}
    with running_forked(arguments, tmp_path, env) as demo:
        invite = demo.wait_for(r"hivenb join (hivenb://\S+) --task digits", 90)[1]
        demo.wait_for(r"training +swarm epoch [1-9]", 90)

        # in this process, for what it returns and says; the next test runs the command
        assert cli.main(["join", invite, "--task", "text"]) == 1
        refused = capsys.readouterr()
        assert "hivenb: " in refused.err
        assert "model" in refused.err.splitlines()[-1]
        assert cli.main(["join", invite, "--epochs", "2"]) == 0
        joined = capsys.readouterr()
        assert "joined the swarm" in joined.out
        assert "this one" in joined.out
        assert "Traceback" not in refused.err + joined.out + joined.err

        family = demo.family()
        assert any("p2pd" in " ".join(process.cmdline()) for process in family)
        demo.interrupt()
        assert demo.wait(60) == 130, demo.output
        assert gone(family, 15)
    assert "interrupted" in demo.output
    assert "Traceback" not in demo.output
    assert not list(tmp_path.iterdir())


@pytest.mark.process
@pytest.mark.slow
def test_who_joins_by_an_invite_takes_part_in_the_run_that_it_is_of(swarm, tmp_path, eventually):
    """One of a notebook, whose run has the default name: it is in no invite."""
    task = unhurried_digits()
    options = hivenb.Options(target_batch_size=task.target_batch_size)
    run = hivenb.TrainingRun(task.model, task.train, swarm=swarm, options=options, accelerator="cpu")
    run.start()
    # till then its averagers are forked, which would inherit the end of a pipe into which the guest writes
    eventually(lambda: run.status.samples, 60)
    with running_forked(["join", swarm.invite, "--name", "Ann"], tmp_path) as guest:
        guest.wait_for("joined the swarm; training digits in the run 'lightning_run'", 90)
        eventually(lambda: run.status.num_peers == 2 and "Ann" in [one.name for one in run.members], 60)
        guest.interrupt()
        assert guest.wait(60) == 0, guest.output


@pytest.mark.process
@pytest.mark.slow
def test_ctrl_c_while_everything_is_still_starting(tmp_path):
    with running([*HIVENB, "demo"], tmp_path) as demo:
        demo.wait_for("loading", 30)
        family = demo.family()
        demo.interrupt()
        assert demo.wait(60) == 130, demo.output
        assert gone(family, 30)  # the server of the peers is in the middle of its imports
    assert "interrupted" in demo.output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["demo", "--epochs", "0"], "0 is not a whole number of at least 1"),
        (["demo", "--epochs", "many"], "'many' is not a whole number"),
        (["demo", "--peers", "-1"], "-1 is not a whole number of at least 0"),
        (["demo", "--task", "chess"], "invalid choice: 'chess'"),
        (["demo", "--json", "nowhere/out.json"], "there is no directory nowhere"),
        (["demo", "--png", "."], ". is a directory"),
        (["join"], "INVITE"),
        (["lab", "--port", "70000"], "70000 is not a whole number of at least 1 and at most 65535"),
        (["dance"], "invalid choice: 'dance'"),
    ],
)
def test_wrong_arguments_are_found_at_once(arguments, complaint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_found_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o500)
    with pytest.raises(SystemExit):
        cli.main(["demo"])
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("invite", ["hivenb://rubbish", "/ip4/127.0.0.1/tcp/1", "me"])
def test_an_invite_that_cannot_be_read_is_one_line(invite, capsys):
    assert cli.main(["join", invite]) == 1
    said = capsys.readouterr().err.strip()
    assert said.startswith("hivenb: ")
    assert "\n" not in said
    with pytest.raises(HivenbError):
        cli.main(["join", invite, "--debug"])


def test_an_invite_is_read_from_the_input_where_others_see_the_command_line(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("rubbish\n"))
    assert cli.main(["join", "-"]) == 1
    assert "'rubbish' is not the address of a peer" in capsys.readouterr().err


def test_help_tells_what_there_is(capsys):
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    for word in ("demo", "lab", "join INVITE", "--version"):
        assert word in shown
    for command, words in {
        "demo": ("--peers", "--epochs", "--json", "--png", "--public", "default: 20"),
        "join": ("INVITE", "--task", "Ctrl-C"),
        "lab": ("--no-browser", "--port"),
    }.items():
        with pytest.raises(SystemExit) as end:
            cli.main([command, "--help"])
        assert end.value.code == 0
        shown = capsys.readouterr().out
        assert all(word in shown for word in words)


@pytest.mark.process
def test_help_imports_nothing_heavy_and_version_tells_all(tmp_path):
    script = (
        "import sys\nfrom hivenb.app.cli import main\n"
        "try:\n    main(['demo', '--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'lightning', 'hivemind', 'numpy', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.endswith("\n[]\n"), done.stdout + done.stderr
    done = subprocess.run(
        [*HIVENB, "--version"], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=60
    )
    assert re.fullmatch(rf"hivenb {re.escape(hivenb.__version__)} \(python .+, hivemind .+, .+\)\n", done.stdout)


def test_the_names_of_the_tasks_are_those_that_there_are():
    assert tuple(TASKS) == cli.TASKS


# -- hivenb lab ----------------------------------------------------------------------------------------------------


def test_a_notebook_inside_the_package_is_copied_once(tmp_path):
    package, folder = tmp_path / "site-packages" / "hivenb" / "_notebooks", tmp_path / "mine"
    package.mkdir(parents=True)
    folder.mkdir()
    original = package / "01_quickstart.ipynb"
    original.write_text("{}")

    own = own_copy(original, folder)
    assert own == folder / original.name
    assert own.read_text() == "{}"
    own.write_text('{"mine": 1}')
    assert own_copy(original, folder) == own
    assert own.read_text() == '{"mine": 1}'
    assert original.read_text() == "{}"


def test_a_notebook_of_the_checkout_is_opened_itself(tmp_path):
    original = tmp_path / "notebooks" / "01_quickstart.ipynb"
    assert own_copy(original, tmp_path) == original


def test_the_copy_goes_elsewhere_where_nothing_can_be_written(tmp_path, monkeypatch):
    package = tmp_path / "_notebooks"
    package.mkdir()
    (package / "01_quickstart.ipynb").write_text("{}")
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    own = own_copy(package / "01_quickstart.ipynb", tmp_path)
    assert own.parent.parent == tmp_path
    assert own.read_text() == "{}"


def test_without_jupyterlab_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("hivenb.app.lab.find_spec", lambda _: None)
    with pytest.raises(MissingDependencyError, match=r"pip install \"hivenb\[demo\]\""):
        open_lab(browser=False, port=None, further=(), terminal=Terminal())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _ask(url: str, timeout: float) -> Any:
    deadline = time.monotonic() + timeout
    while True:
        try:
            with urllib.request.urlopen(url, timeout=timeout) as answer:
                return json.load(answer)
        except urllib.error.URLError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.1)


def test_how_it_goes_is_one_line_that_is_written_over(
    swarm: hivenb.Swarm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a terminal, run.wait() leaves a line each time that it returns."""
    monkeypatch.setattr(wait_output, "_somebody_looks", lambda: True)
    options = hivenb.Options(target_batch_size=32)
    run = hivenb.TrainingRun(tiny.PacedModel(), tiny.loader(), swarm=swarm, options=options, accelerator="cpu")
    run.start()
    assert demo._watch(run, Terminal(io.StringIO()), until_epoch=3).epoch >= 3
    run._recorder.epoch += 1000  # as one that joins late, whose first epochs count as those of others do
    before = run.status.trained_epochs
    assert before >= 3
    assert demo._watch(run, Terminal(io.StringIO()), for_epochs=before + 2).trained_epochs >= before + 2
    run.stop()
    assert not demo._watch(run, Terminal(io.StringIO())).state.is_active, "it has ended"
    assert capsys.readouterr().out == ""
