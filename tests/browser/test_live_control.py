"""Live control in JupyterLab, in one notebook: switches, a wrong value, stop and start, and a peer by the slider.

And while a cell keeps the kernel busy: buttons act at once, and a line tells how far it is.
"""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest

from .conftest import wait_for
from .test_quickstart import keep_screenshot, run_all

pytestmark = [pytest.mark.browser, pytest.mark.slow]

#: The cell that shows the dashboard writes down, again and again, what the run itself knows: the buttons and switches
#: act in the kernel, and a picture tells a test nothing.
CELLS = (
    """
import time
import hivenb
from hivenb import tasks

class Unhurried(tasks.DigitsModel):  # leaves the cores to the browser
    def training_step(self, batch, batch_idx):
        time.sleep(0.04)
        return super().training_step(batch, batch_idx)

task = tasks.digits()
swarm = hivenb.Swarm(public_name='Ann')
""",
    "options = hivenb.Options(target_batch_size=512, matchmaking_time=2.0)\n"
    "run = hivenb.TrainingRun(Unhurried(), (task.train, task.validation), swarm=swarm, options=options)\n"
    "hivenb.Dashboard(run)",
    """
import json, os, threading
from hivenb.figures.measured_traffic import per_epoch
def tell():
    while True:
        seen = run.history.snapshot()
        sent = per_epoch(seen.series["bytes_sent"]) if "bytes_sent" in seen.series else None
        facts = {
            "epoch": run.status.epoch, "state": run.status.state.value, "codec": str(run.options.grad_compression),
            "target": run.options.target_batch_size, "peers": run.status.num_peers,
            "local": len(swarm.local_peers), "marks": [e.text for e in seen.events if e.kind == "option"],
            "sent": [] if sent is None else [[float(at), float(much)] for at, _, much in zip(*sent)],
            "changed_at": [e.time for e in seen.events if e.kind == "option"],
        }
        with open("facts.new", "w") as f:
            json.dump(facts, f)
        os.replace("facts.new", "facts.json")
        time.sleep(0.3)
threading.Thread(target=tell, daemon=True).start()
""",
)

#: A cell that is busy the second time it is run.
BUSY = """
if os.path.exists("steered"):
    run.start()
    json.dump("began", open("busy.json", "w"))
    run.wait(epochs=100_000, timeout=60)
    json.dump("ended", open("busy.json", "w"))
"""

#: Seconds within which a click acts although a cell runs; one that waits for the cell would take all of its minute.
AT_ONCE = 20

DASHBOARD = ".jp-OutputArea-output .hivenb"


def notebook(folder: Path, name: str, cells: tuple[str, ...]) -> str:
    content = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in cells])
    content.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(content, folder / name)
    return name


class Told:
    """What the run says of itself, in the kernel."""

    def __init__(self, folder: Path, name: str = "facts"):
        self._file = folder / f"{name}.json"

    def __getitem__(self, name: str):
        return json.loads(self._file.read_text())[name] if self._file.exists() else None

    def wait(self, condition, seconds: float, failure: str) -> None:
        wait_for(lambda: self._file.exists() and condition(), seconds, failure)

    def sent(self, since: float, until: float = float("inf")) -> list[float]:
        """Bytes sent in each epoch that has ended meanwhile."""
        return [much for at, much in self["sent"] if since < at <= until]


def slide(dashboard, steps: int) -> None:
    """Drag the slider for local peers so many to the right; Notebook 7 keeps the arrow keys for its cells.

    What is drawn above the slider changes its height now and then, also while the mouse is on its way: then a person
    drags once more, and so does this.
    """
    handle = dashboard.locator(".widget-slider .noUi-handle").first
    wanted = float(handle.get_attribute("aria-valuenow")) + steps

    def is_there() -> bool:
        there = float(handle.get_attribute("aria-valuenow"))
        if there != wanted:
            _drag(dashboard, handle, wanted - there)
        return float(handle.get_attribute("aria-valuenow")) == wanted

    wait_for(is_there, 20, f"the slider does not come to {wanted}")


def _drag(dashboard, handle, steps: float) -> None:
    handle.scroll_into_view_if_needed()
    place, most = handle.bounding_box(), float(handle.get_attribute("aria-valuemax"))
    width = dashboard.locator(".widget-slider .noUi-base").first.bounding_box()["width"]
    x, y = place["x"] + place["width"] / 2, place["y"] + place["height"] / 2
    mouse = dashboard.page.mouse
    mouse.move(x, y)
    mouse.down()
    mouse.move(x + steps / most * width, y, steps=5)
    mouse.up()


def what_is_cut_off(dashboard) -> list[str]:
    """Labels, buttons and fields of the dashboard that do not show all of their text."""
    return dashboard.evaluate(
        """root => [...root.querySelectorAll('label, button, .widget-label, .hivenb-scroll')]
            .filter(e => e.offsetParent && e.scrollWidth > e.clientWidth + 1)
            .filter(e => getComputedStyle(e).overflow !== 'visible')
            .map(e => e.textContent.trim()).filter(text => text)"""
    )


def steer(dashboard, told: Told, name: str) -> None:
    """Do with a dashboard what a person does, and see it act; at the end the run trains.

    :param name: with which the names of the pictures begin
    """
    told.wait(lambda: told["state"] == "ready", 60, "the cells did not run")
    dashboard.scroll_into_view_if_needed()
    keep_screenshot(dashboard, f"{name}-0-ready")

    # a peer on this machine, by the slider
    slide(dashboard, 1)
    told.wait(lambda: told["local"] == 1, 60, "no local peer came")
    picture = dashboard.locator("img").first
    dashboard.get_by_role("button", name="Start").click()
    dashboard.get_by_text("training").first.wait_for(timeout=60_000)
    first = picture.get_attribute("src")
    wait_for(lambda: picture.get_attribute("src") != first, 30, "the picture does not change")
    told.wait(lambda: told["peers"] == 2, 60, "the local peer does not train")
    dashboard.get_by_text("local 1").wait_for(timeout=20_000)
    dashboard.locator("td", has_text="Ann").first.wait_for(timeout=20_000)
    told.wait(lambda: len(told["sent"]) >= 8, 120, "no traffic was counted")
    keep_screenshot(dashboard, f"{name}-1-training")

    # less to send, half precision, and a mark that says when
    dashboard.get_by_label("gradients").select_option(index=1)
    told.wait(lambda: told["codec"] == "float16", 30, "the codec did not change")
    told.wait(lambda: told["marks"] == ["gradients: float16"], 10, "no mark")
    (changed,) = told["changed_at"]
    told.wait(lambda: len(told.sent(changed)) >= 8, 120, "no traffic was counted afterwards")
    before, after = (sorted(much)[len(much) // 2] for much in (told.sent(0, changed), told.sent(changed)))
    assert after < 0.9 * before, "gradients are half as large, and half of what is sent"
    keep_screenshot(dashboard, f"{name}-2-float16")

    # what is wrong is said at its field, and does not reach the run
    field = dashboard.get_by_label("target batch size")
    field.fill("-5")
    field.press("Tab")
    wrong = dashboard.locator(".hivenb-trouble", has_text="target_batch_size")
    wrong.wait_for(timeout=20_000)
    below = wrong.bounding_box()["y"] - field.bounding_box()["y"]
    assert 0 < below < 60, "at the field"
    epoch = told["epoch"]
    told.wait(lambda: told["epoch"] >= epoch + 3, 120, "the run does not go on")
    assert (told["target"], told["state"]) == (512, "training")
    assert field.input_value() == "-5"
    keep_screenshot(dashboard, f"{name}-3-refused")

    # Stop, change, Start
    dashboard.get_by_role("button", name="Stop").click()
    told.wait(lambda: told["state"] == "stopped", 60, "it does not stop")
    dashboard.get_by_text("stopped").first.wait_for(timeout=20_000)
    epoch = told["epoch"]
    field.fill("256")
    field.press("Tab")
    told.wait(lambda: told["target"] == 256, 20, "the target batch size did not change")
    wrong.wait_for(state="hidden", timeout=20_000)
    keep_screenshot(dashboard, f"{name}-4-stopped")
    dashboard.get_by_role("button", name="Start").click()
    told.wait(lambda: told["epoch"] >= epoch + 3, 90, "it does not go on where it was")
    assert (told["target"], told["codec"]) == (256, "float16")

    # the same as a script
    dashboard.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    dashboard.get_by_role("tab", name="Code").click()
    dashboard.locator(".hivenb-code").get_by_role("button", name="Copy").click()
    script = dashboard.page.evaluate("navigator.clipboard.readText()")
    compile(script, "script", "exec")
    assert "target_batch_size=256" in script
    assert "Float16Compression" in script
    keep_screenshot(dashboard, f"{name}-5-code")
    dashboard.get_by_role("tab", name="Peers").click()


def end(dashboard, told: Told, name: str) -> None:
    """Send the local peer away, and stop.

    It has ended with the run, and comes back with it: a busy machine takes a while for that.
    """
    told.wait(lambda: told["local"] == 1, 90, "the local peer does not come back")
    handle = dashboard.locator(".widget-slider .noUi-handle").first
    wait_for(lambda: float(handle.get_attribute("aria-valuenow")) == 1, 20, "the slider does not show the local peer")
    slide(dashboard, -1)
    told.wait(lambda: told["local"] == 0, 60, "the local peer stays")
    told.wait(lambda: told["peers"] == 1, 60, "the local peer is still counted")
    dashboard.get_by_role("button", name="Stop").click()
    told.wait(lambda: told["state"] == "stopped", 60, "it does not stop")
    keep_screenshot(dashboard, f"{name}-8-alone")


def clicks_act_at_once_while_a_cell_runs(page, dashboard, told: Told, folder: Path) -> None:
    """With a run that is stopped."""
    (folder / "steered").touch()
    page.locator(".jp-WindowedPanel-outer").first.evaluate("panel => { panel.scrollTop = panel.scrollHeight; }")
    page.locator(".jp-CodeCell", has_text="steered").last.locator(".cm-content").click()
    page.keyboard.press("Shift+Enter")
    busy = folder / "busy.json"
    wait_for(busy.exists, 90, "the cell did not begin")
    epoch = told["epoch"]
    told.wait(lambda: told["epoch"] >= epoch + 2, 60, "it does not train")

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


@pytest.mark.timeout(480)
def test_what_a_person_changes_while_it_trains_is_seen_and_a_wrong_value_is_refused(lab, page):
    folder = lab.folder / "live"
    folder.mkdir()
    told = Told(folder)
    page.goto(lab.open(f"live/{notebook(folder, 'live.ipynb', (*CELLS, BUSY))}"))
    run_all(page)
    dashboard = page.locator(DASHBOARD).first
    dashboard.wait_for(timeout=90_000)
    steer(dashboard, told, "live")

    # dark, and narrow
    page.get_by_role("menuitem", name="Settings", exact=True).first.click()
    page.get_by_text("Theme", exact=True).first.click()
    page.get_by_text("JupyterLab Dark", exact=True).first.click()
    page.locator("body[data-jp-theme-light='false']").wait_for(state="attached", timeout=20_000)
    keep_screenshot(dashboard, "live-6-dark")
    page.set_viewport_size({"width": 900, "height": 1300})
    dashboard.get_by_role("button", name="Stop").scroll_into_view_if_needed()
    wait_for(lambda: not what_is_cut_off(dashboard), 10, "something is cut off")
    keep_screenshot(dashboard, "live-7-narrow-dark")
    end(dashboard, told, "live")

    page.set_viewport_size({"width": 1400, "height": 1000})
    clicks_act_at_once_while_a_cell_runs(page, dashboard, told, folder)
