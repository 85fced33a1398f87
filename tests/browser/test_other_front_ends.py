"""The quickstart's dashboard elsewhere than in JupyterLab: as a web page of its own (Voila), and in Notebook 7."""

from __future__ import annotations

import json
import signal
import socket

import nbformat
import pytest

from hivenb.environment import notebook

from .conftest import answers, serving, wait_for
from .test_quickstart import keep_screenshot, run_all

pytestmark = [pytest.mark.browser, pytest.mark.long]

#: Writes down what the run says of itself; a page of Voila's has no cells to ask it in.
TELL = """
import json, os, threading, time
def tell():
    while True:
        with open("facts.new", "w") as f:
            json.dump({"overlap": run.options.delay_state_averaging, "state": run.status.state.value}, f)
        os.replace("facts.new", "facts.json")
        time.sleep(0.3)
threading.Thread(target=tell, daemon=True).start()
"""


def until_the_dashboard(name: str) -> nbformat.NotebookNode:
    """The cells of one of the notebooks up to the one that shows the dashboard."""
    content = nbformat.read(notebook(name), as_version=4)
    shown = next(i for i, cell in enumerate(content.cells) if "hivenb.Dashboard(" in cell.source)
    for cell in content.cells:
        if cell.cell_type == "code":
            cell.outputs = []  # a picture from when it was written would be taken for one of this run
    content.cells = [*content.cells[: shown + 1], nbformat.v4.new_code_cell(TELL.strip())]
    return content


@pytest.fixture
def folder(tmp_path):
    nbformat.write(until_the_dashboard("01_quickstart"), tmp_path / "page.ipynb")
    return tmp_path


@pytest.fixture
def voila(folder):
    pytest.importorskip("voila", reason="Voila is not installed: pip install voila")
    arguments = ["page.ipynb", "--Voila.ip=127.0.0.1"]
    with serving("voila", *arguments, log=folder / "voila.log", end=signal.SIGINT, cwd=folder) as url:
        wait_for(lambda: _listening(url), 60, "Voila does not listen")
        yield url


@pytest.fixture
def notebook_7(folder):
    pytest.importorskip("notebook", reason="Notebook 7 is not installed: pip install notebook")
    arguments = ["--allow-root", "--ip=127.0.0.1", "--IdentityProvider.token=", "--ServerApp.password="]
    with serving("notebook", *arguments, log=folder / "notebook.log", end=signal.SIGTERM, cwd=folder) as url:
        wait_for(lambda: answers(url + "/api"), 60, "Notebook does not answer")
        yield url


@pytest.mark.timeout(240)
def test_the_dashboard_is_shown_by_voila_and_a_switch_acts(voila, page, folder):
    page.goto(voila, timeout=180_000)
    a_switch_acts(page, folder, "voila")


@pytest.mark.timeout(240)
def test_the_dashboard_is_shown_by_notebook_7_and_a_switch_acts(notebook_7, page, folder):
    page.goto(f"{notebook_7}/notebooks/page.ipynb")
    run_all(page, idle=".jp-Notebook-ExecutionIndicator[data-status='idle']")
    a_switch_acts(page, folder, "notebook-7")


def a_switch_acts(page, folder, name: str) -> None:
    """See the dashboard, use one of its switches, and wait until the run has changed."""

    def told(name: str):
        file = folder / "facts.json"
        return json.loads(file.read_text())[name] if file.exists() else None

    dashboard = page.locator(".hivenb").first
    dashboard.wait_for(timeout=120_000)
    assert dashboard.locator("img").first.get_attribute("src")
    keep_screenshot(dashboard, f"{name}-shown")
    wait_for(lambda: told("state") is not None, 60, "the run does not tell")
    assert told("overlap") is False
    dashboard.get_by_label("state averaging in background").check()
    wait_for(lambda: told("overlap") is True, 30, "the switch does not act")
    keep_screenshot(dashboard, f"{name}-switched")


def _listening(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0
