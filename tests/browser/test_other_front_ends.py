"""The dashboard elsewhere than in JupyterLab: as a web page of its own (Voila), and in Notebook 7."""

from __future__ import annotations

import signal
import socket

import pytest

from .conftest import answers, serving, wait_for
from .test_chart_pointer import CELLS as WRITTEN_RUN
from .test_chart_pointer import Charts
from .test_live_control import CELLS, DASHBOARD, Told, end, notebook, steer
from .test_quickstart import keep_screenshot, run_all

pytestmark = [pytest.mark.browser, pytest.mark.long]


@pytest.fixture
def folder(tmp_path, request):
    notebook(tmp_path, "page.ipynb", getattr(request, "param", CELLS))
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


@pytest.mark.timeout(420)
def test_it_is_steered_in_a_page_of_voilas(voila, page, folder):
    page.goto(voila, timeout=180_000)
    live_control(page.locator(".hivenb").first, folder, "voila")


@pytest.mark.timeout(420)
def test_it_is_steered_in_notebook_7(notebook_7, page, folder):
    page.goto(f"{notebook_7}/notebooks/page.ipynb")
    run_all(page, idle=".jp-Notebook-ExecutionIndicator[data-status='idle']")
    live_control(page.locator(DASHBOARD).first, folder, "notebook-7")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("folder", [WRITTEN_RUN], indirect=True, ids=["written"])
def test_a_pointer_is_answered_in_a_page_of_voilas(voila, page, folder):
    page.goto(voila, timeout=180_000)
    pointer_is_answered(Charts(page, ""), "voila")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("folder", [WRITTEN_RUN], indirect=True, ids=["written"])
def test_a_pointer_is_answered_in_notebook_7(notebook_7, page, folder):
    page.goto(f"{notebook_7}/notebooks/page.ipynb")
    run_all(page, idle=".jp-Notebook-ExecutionIndicator[data-status='idle']")
    pointer_is_answered(Charts(page), "notebook-7")


def pointer_is_answered(charts: Charts, name: str) -> None:
    charts.appear()
    page, before = charts.page, charts.across("Loss")
    charts.says("Loss", 100.0, r"validation\s+0\.823", "1 min")
    page.mouse.wheel(0, -400)
    charts.wait(lambda: charts.across("Loss") != before, "the wheel does nothing")
    charts.says("Peers", 100.0, "1 min 4")
    keep_screenshot(page, f"{name}-pointer")
    with page.expect_download() as saving:
        page.get_by_role("button", name="CSV").click()
    assert saving.value.path().read_text().startswith("chart,series,seconds,value")
    page.mouse.dblclick(*charts.at("Loss", 100.0))
    charts.wait(lambda: charts.across("Loss") == before, "a double click does not come back")


def live_control(dashboard, folder, name: str) -> None:
    dashboard.wait_for(timeout=120_000)
    told = Told(folder)
    steer(dashboard, told, name)
    end(dashboard, told, name)


def _listening(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0
