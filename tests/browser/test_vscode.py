"""The dashboard in VS Code: with its widget manager, steered, scrolled away, and opened again."""

from __future__ import annotations

import base64
import re

import pytest

from .conftest import wait_for
from .test_chart_pointer import CELLS as WRITTEN_RUN
from .test_chart_pointer import Charts
from .test_live_control import CELLS, Told, end, steer
from .test_quickstart import keep_screenshot
from .vscode_page import Notebook, build_pages

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(600)]

#: A cell that is busy until a file is there.
BUSY = """
from pathlib import Path
import time
Path("busy").touch()
while not Path("free").exists():
    time.sleep(0.05)
"""


@pytest.fixture(scope="session")
def pages(request, tmp_path_factory):
    cache = getattr(request.config, "cache", None)  # there is none with -p no:cacheprovider
    folder = tmp_path_factory.mktemp("vscode")
    build_pages(folder, cache.mkdir("vscode") if cache else tmp_path_factory.mktemp("npm"))
    return folder


@pytest.fixture
def folder(lab, request):
    name = lab.folder / f"vscode-{request.node.name}"
    name.mkdir()
    return name


@pytest.fixture
def notebook(pages, lab, page, folder):
    opened = Notebook(page, lab.url, f"{folder.name}/notebook.ipynb", pages)
    try:
        opened.open()
        yield opened
    finally:
        opened.close()


#: Texts that can hardly be read, with their contrast: https://www.w3.org/TR/WCAG21/#dfn-contrast-ratio.
#: The grey of small words is that of the widget manager, 4 on white; the ink of VS Code's dark theme has 1.6 there.
FAINT = """
root => {
    const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
    const luminance = ([r, g, b]) => [r, g, b].map(v => v / 255)
        .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const paper = (e) => {
        for (; e; e = e.parentElement) {
            const color = numbers(getComputedStyle(e).backgroundColor);
            if (color.length === 3 || color[3] > 0.9) return color;
        }
        return [31, 31, 31];
    };
    const contrast = (e) => {
        const under = paper(e), [red, green, blue, alpha = 1] = numbers(getComputedStyle(e).color);
        const ink = [red, green, blue].map((v, i) => alpha * v + (1 - alpha) * under[i]);
        const [a, b] = [luminance(ink), luminance(under)];
        return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    };
    return [...root.querySelectorAll("*")]
        .filter(e => e.checkVisibility() && !e.closest(":disabled, .absent"))
        .filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()) && e.tagName !== "STYLE")
        .map(e => [e.textContent.trim().slice(0, 40), contrast(e)])
        .filter(([, much]) => much < 3);
}
"""


def epoch_in(dashboard) -> int:
    """The epoch that a dashboard shows."""
    words = dashboard.locator(".hivenb-facts").inner_text()
    # not the one from which a run goes on, which is named before it
    return int(re.search(r"^swarm epoch\s+([\d,]+)", words, re.MULTILINE).group(1).replace(",", ""))


def goes_on(dashboard) -> None:
    """It changes by itself, without a cell that runs."""
    before = epoch_in(dashboard)
    wait_for(lambda: epoch_in(dashboard) >= before + 2, 90, "the dashboard stands still")


# What the dashboard does, JupyterLab's test holds; this one, as those of other front ends, that it does so here.
@pytest.mark.long
def test_it_is_steered_and_is_live_again_when_it_is_shown_again(notebook, folder):
    told, dashboard = Told(folder), notebook.view.locator(".hivenb")
    notebook.run(*CELLS)
    dashboard.wait_for(timeout=60_000)
    steer(dashboard, told, "vscode")
    goes_on(dashboard)
    assert dashboard.evaluate(FAINT) == []
    assert dashboard.locator("td").first.evaluate("cell => getComputedStyle(cell).textAlign") == "left"

    # a click while a cell runs is not lost: it acts when the kernel is free
    notebook.begin(BUSY)
    wait_for((folder / "busy").exists, 60, "the cell does not run")
    dashboard.get_by_role("button", name="Pause").click()
    (folder / "free").touch()
    notebook.finish()
    told.wait(lambda: told["state"] == "paused", 60, "the click was lost")
    dashboard.get_by_role("button", name="Resume").click()
    told.wait(lambda: told["state"] == "training", 60, "it does not go on")

    # scrolled away and back
    notebook.scroll_away_and_back()
    dashboard.wait_for(timeout=30_000)
    assert dashboard.count() == 1
    goes_on(dashboard)
    dashboard.get_by_label("gradients").select_option(index=0)
    told.wait(lambda: told["codec"] == "none", 30, "a switch that is shown again does nothing")

    # opened again, while the kernel goes on: a web view that knows none of its widgets
    notebook.open()
    notebook.run("hivenb.Dashboard(run)")
    dashboard.wait_for(timeout=60_000)
    goes_on(dashboard)
    keep_screenshot(dashboard, "vscode-7-opened-again")
    end(dashboard, told, "vscode")
    assert notebook.errors == []


@pytest.mark.long
def test_its_charts_answer_a_pointer_and_are_saved(notebook):
    page, charts = notebook.page, Charts(notebook.view, "")
    charts.page = page
    notebook.run(*WRITTEN_RUN)
    charts.appear()
    before = charts.across("Loss")
    charts.says("Loss", 100.0, r"validation\s+0\.823", "1 min")
    keep_screenshot(page, "vscode-pointer")
    page.mouse.wheel(0, -400)
    charts.wait(lambda: charts.across("Loss") != before, "the wheel does nothing")
    page.mouse.dblclick(*charts.at("Loss", 100.0))
    charts.wait(lambda: charts.across("Loss") == before, "a double click does not come back")
    notebook.view.get_by_role("button", name="CSV").click()
    (saved,) = wait_for(notebook.saved, 30, "nothing is saved")
    assert saved["name"] == "hivenb-charts.csv"
    table = base64.b64decode(saved["data"].partition(",")[2]).decode()
    assert table.startswith("chart,series,seconds,value")
    assert notebook.errors == []
