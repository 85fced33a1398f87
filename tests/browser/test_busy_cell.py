"""A dashboard in JupyterLab while a cell keeps the kernel busy: buttons act at once, and a line tells how far it is."""

from __future__ import annotations

import json

import pytest

from .conftest import wait_for
from .test_live_control import CELLS, DASHBOARD, Told, notebook
from .test_quickstart import keep_screenshot, run_all

pytestmark = [pytest.mark.browser, pytest.mark.slow]

#: Seconds within which a click acts although a cell runs; one that waits for the cell would take all of its minute.
AT_ONCE = 20

BUSY = """
run.start()
json.dump("began", open("busy.json", "w"))
run.wait(epochs=100_000, timeout=60)
json.dump("ended", open("busy.json", "w"))
"""


@pytest.mark.timeout(240)
def test_clicks_act_at_once_while_a_cell_runs(lab, page):
    told, busy = Told(lab.folder), lab.folder / "busy.json"
    page.goto(lab.open(notebook(lab.folder, "busy.ipynb", (*CELLS, BUSY))))
    run_all(page)
    dashboard = page.locator(DASHBOARD).first
    dashboard.wait_for(timeout=90_000)
    wait_for(busy.exists, 90, "the cell did not begin")
    told.wait(lambda: told["epoch"] >= 2, 60, "it does not train")

    line = page.locator(".jp-OutputArea-output", has_text="/100000 [").first
    line.wait_for(timeout=20_000)
    first = line.inner_text()
    wait_for(lambda: line.inner_text() != first, 20, "the line does not change")

    for button, state in (("Pause", "paused"), ("Resume", "training"), ("Stop", "stopped")):
        dashboard.get_by_role("button", name=button).click()
        told.wait(lambda state=state: told["state"] == state, AT_ONCE, f"{button} waits for the cell")
        if button == "Pause":
            assert json.loads(busy.read_text()) == "began", "the cell still runs"
            keep_screenshot(page, "busy-cell-paused")
    page.locator(".jp-OutputArea-output", has_text="not reached, stopped").first.wait_for(timeout=20_000)
