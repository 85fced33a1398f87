"""The quickstart's dashboard as a web page of its own, without a notebook around it: Voila."""

from __future__ import annotations

import json
import signal
import socket

import nbformat
import pytest

from hivenb.environment import notebook

from .conftest import serving, wait_for
from .test_quickstart import keep_screenshot

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
    content.cells = [*content.cells[: shown + 1], nbformat.v4.new_code_cell(TELL.strip())]
    return content


@pytest.fixture
def voila(tmp_path):
    pytest.importorskip("voila", reason="Voila is not installed: pip install voila")
    nbformat.write(until_the_dashboard("01_quickstart"), tmp_path / "page.ipynb")
    arguments = ["page.ipynb", "--Voila.ip=127.0.0.1"]
    with serving("voila", *arguments, log=tmp_path / "voila.log", end=signal.SIGINT, cwd=tmp_path) as url:
        yield url


@pytest.mark.timeout(240)
def test_the_dashboard_is_shown_by_voila_and_a_switch_acts(voila, page, tmp_path):
    def told(name: str):
        file = tmp_path / "facts.json"
        return json.loads(file.read_text())[name] if file.exists() else None

    page.goto(wait_for(lambda: _listening(voila) and voila, 60, "Voila does not listen"), timeout=180_000)
    dashboard = page.locator(".hivenb").first
    dashboard.wait_for(timeout=120_000)
    assert dashboard.locator("img").first.get_attribute("src")
    keep_screenshot(dashboard, "voila-shown")
    wait_for(lambda: told("state") is not None, 60, "the run does not tell")
    assert told("overlap") is False
    dashboard.get_by_label("state averaging in background").check()
    wait_for(lambda: told("overlap") is True, 30, "the switch does not act")
    keep_screenshot(dashboard, "voila-switched")


def _listening(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0
