"""A real Jupyter kernel in a process of its own, and all that it starts."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.manager import KernelManager

#: Seconds that a cell may take; the machine may be busy.
PATIENCE = 120.0


class CellError(Exception):
    """A cell ended with an exception, whose name is that of the exception's class."""

    def __init__(self, name: str, value: str, seconds: float):
        super().__init__(f"{name}: {value}")
        self.name, self.seconds = name, seconds


class Kernel:
    """Runs cells, and knows the processes that came of it.

    :param folder: where it runs
    :param python: the interpreter; by default this one
    """

    def __init__(self, folder: Path, python: str | None = None):
        tests = Path(__file__).parent.parent
        search = os.pathsep.join([str(tests.parent), str(tests), *filter(None, [os.environ.get("PYTHONPATH")])])
        #: messages that came while another cell was waited for than the one they belong to
        self.strays: list[dict[str, Any]] = []
        self.manager = KernelManager(kernel_name="python3")
        if python is not None:
            self.manager.kernel_spec.argv[0] = python
        self.manager.start_kernel(env={**os.environ, "PYTHONPATH": search, "TMPDIR": str(folder)}, cwd=str(folder))
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE)
        self.process = psutil.Process(self.manager.provisioner.pid)

    def begin(self, code: str) -> str:
        """Send a cell and do not wait for it."""
        return self.client.execute(code)

    def finish(self, cell: str) -> str:
        """Wait for a cell, and return what it, and nothing but it, has put out, as a front end shows it.

        :raises CellError: if it ended with an exception
        """
        started, text, error = time.monotonic(), "", None
        while True:
            message = self.client.get_iopub_msg(timeout=max(0.1, PATIENCE - (time.monotonic() - started)))
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != cell:
                self.strays.append(message)
                continue
            if kind == "stream":
                text += content["text"]
            elif kind in ("execute_result", "display_data"):
                text += content["data"].get("text/plain", "?")
            elif kind == "error":
                error = CellError(content["ename"], content["evalue"], time.monotonic() - started)
            elif kind == "status" and content["execution_state"] == "idle":
                break
        self.client.get_shell_msg(timeout=PATIENCE)
        if error is not None:
            raise error
        return _as_shown(text)

    def run(self, code: str) -> str:
        """Run a cell; see :meth:`finish`."""
        return self.finish(self.begin(code))

    def interrupt(self) -> None:
        """As the button of the same name does: SIGINT to the whole process group."""
        self.manager.interrupt_kernel()

    def restart(self, by_force: bool) -> None:
        """As the button of the same name does.

        :param by_force: kill it at once, instead of asking it to end first
        """
        self.manager.restart_kernel(now=by_force)
        self.client.wait_for_ready(timeout=PATIENCE)
        self.process = psutil.Process(self.manager.provisioner.pid)

    def family(self) -> list[psutil.Process]:
        """The kernel and all its descendants that are alive."""
        everybody = [self.process, *self.process.children(recursive=True)]
        return [process for process in everybody if _is_alive(process)]

    def close(self) -> None:
        """End it by force, with all that it has started."""
        family = self.family() if self.process.is_running() else []
        self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=True)
        _, alive = psutil.wait_procs(family, timeout=10)
        for process in alive:
            process.kill()
        assert alive == [], "outlived the kernel"


def _as_shown(text: str) -> str:
    """What a carriage return writes over is gone."""
    return re.sub(r" +\n", "\n", re.sub(r"[^\n]*\r(?=[^\n])", "", text))


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:  # it has ended since it was listed
        return False
