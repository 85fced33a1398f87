"""A real JupyterLab server and a real Chromium for the tests of this folder."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from hivenb.peers.fork_server import VARIABLE

#: Chromium's own services would only wait for a network that a test machine need not have.
CHROMIUM_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@dataclass(frozen=True)
class Lab:
    """A running JupyterLab.

    :param url: where it answers
    :param folder: the folder that it shows
    """

    url: str
    folder: Path

    def open(self, name: str) -> str:
        """The address of a notebook in the folder."""
        return f"{self.url}/lab/tree/{name}?reset"

    def end_kernels(self) -> None:
        """As *Shut Down All Kernels* does: what notebooks have left training takes no time from what comes next."""
        kernels = f"{self.url}/api/kernels"
        # what the page of a browser would have got to know, and be asked for when it changes anything
        known = {"Cookie": f"_xsrf={'0' * 32}", "X-XSRFToken": "0" * 32}
        with urllib.request.urlopen(kernels, timeout=20) as response:
            running = json.load(response)
        for kernel in running:
            asked = urllib.request.Request(f"{kernels}/{kernel['id']}", method="DELETE", headers=known)
            try:
                urllib.request.urlopen(asked, timeout=60).close()
            except urllib.error.HTTPError as e:
                if e.code != HTTPStatus.NOT_FOUND:  # it has ended by itself meanwhile
                    raise


def find_chromium() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    pytest.skip("no Chromium: install it with your system's packages (Debian: apt-get install chromium)")


@contextlib.contextmanager
def serving(
    module: str, *arguments: str, log: Path, end: signal.Signals, python: str = sys.executable, **process: Any
) -> Iterator[str]:
    """A web server in a process of its own; gives its address, and ends it.

    :param module: it is run as ``python -m`` does, with a free port in its arguments
    :param log: where its messages go
    :param end: the signal on which it ends its kernels first, and then itself
    :param python: the interpreter
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, "-m", module, "--no-browser", f"--port={port}", *arguments]
    with log.open("wb") as messages:
        server = subprocess.Popen(command, stdout=messages, stderr=messages, start_new_session=True, **process)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.send_signal(end)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


@contextlib.contextmanager
def jupyterlab(folder: Path, own: Path, *arguments: str) -> Iterator[Lab]:
    """JupyterLab as somebody has it who has just installed it, without news.

    :param folder: what it shows
    :param own: an empty folder for its settings and messages
    :param arguments: more of them
    """
    private = {
        name: str(own / name.lower())
        for name in (
            "JUPYTER_CONFIG_DIR",
            "JUPYTER_RUNTIME_DIR",
            "JUPYTERLAB_WORKSPACES_DIR",
            "JUPYTERLAB_SETTINGS_DIR",
        )
    }
    settings = Path(private["JUPYTERLAB_SETTINGS_DIR"]) / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    quiet = {"fetchNews": "false", "checkForUpdates": False}
    (settings / "notification.jupyterlab-settings").write_text(json.dumps(quiet))
    options = ["--IdentityProvider.token=", "--ServerApp.password=", f"--ServerApp.root_dir={folder}"]
    given = ["--allow-root", "--ip=127.0.0.1", *options, *arguments]
    # local peers are forked from a copy of their kernel, as on Binder: a server of their own would import all once more
    log, env = own / "lab.log", {**os.environ, **private, VARIABLE: "1"}
    with serving("jupyterlab", *given, log=log, end=signal.SIGTERM, env=env) as url:
        wait_for(lambda: answers(url + "/api"), 60, f"JupyterLab did not answer; see {log}")
        yield Lab(url, folder)


@pytest.fixture(scope="package")
def running_lab(tmp_path_factory):
    pytest.importorskip("jupyterlab", reason="JupyterLab is not installed")
    with jupyterlab(tmp_path_factory.mktemp("lab"), tmp_path_factory.mktemp("jupyter")) as running:
        yield running


@pytest.fixture(scope="module")
def lab(running_lab):
    """One for all files, but the kernels of a file end with it: the quickstart, by itself, trains on."""
    yield running_lab
    running_lab.end_kernels()


@pytest.fixture(scope="package")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = find_chromium()
    with playwright.sync_playwright() as p:
        running = p.chromium.launch(executable_path=chromium, args=CHROMIUM_ARGUMENTS)
        yield running
        running.close()


@pytest.fixture
def page(browser, request):
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    yield page
    if (folder := os.environ.get("HIVENB_SCREENSHOTS")) and not page.is_closed():
        page.screenshot(path=Path(folder) / f"{request.node.name}.png")
    page.close()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def wait_for(condition, seconds: float, failure: str, interval: float = 0.2):
    """Look again and again until a condition holds, and return what it gave."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{failure} (after {seconds} s)")
        time.sleep(interval)
    return result
