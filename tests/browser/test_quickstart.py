"""What a person does with the quickstart: run it in JupyterLab, watch, and stop."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hivenb.system.environment import notebook

from .conftest import wait_for

pytestmark = [pytest.mark.browser, pytest.mark.slow]

PICTURE = ".jp-OutputArea-output .hivenb img"
STATE = ".jp-OutputArea-output .hivenb"


def keep_screenshot(shown, name: str) -> None:
    """Where HIVENB_SCREENSHOTS names a folder, leave a picture of a page or a part of it there."""
    if folder := os.environ.get("HIVENB_SCREENSHOTS"):
        shown.screenshot(path=Path(folder) / f"{name}.png")


def switch_theme(page, theme: str) -> None:
    """Of JupyterLab, by its menu.

    :param theme: ``"Light"`` or ``"Dark"``
    """
    page.get_by_role("menuitem", name="Settings", exact=True).first.click()
    page.get_by_text("Theme", exact=True).first.click()
    page.get_by_text(f"JupyterLab {theme}", exact=True).first.click()
    is_light = str(theme == "Light").lower()
    page.locator(f"body[data-jp-theme-light='{is_light}']").wait_for(state="attached", timeout=20_000)


def run_all(page, idle: str = "text='Python 3 (ipykernel) | Idle'") -> None:
    """Run all cells once the kernel is ready, as this selector tells; by default that of JupyterLab's status bar."""
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
    page.locator(idle).first.wait_for(timeout=60_000)
    page.get_by_role("menuitem", name="Run", exact=True).first.click()
    page.get_by_text("Run All Cells", exact=True).first.click()


def is_in_view(shown) -> bool:
    """Whether all of it, or of what fits, stands in the page without scrolling, at least its upper edge."""
    box = shown.bounding_box()
    return box is not None and 0 <= box["y"] < shown.page.viewport_size["height"] - 100


def picture(page) -> str | None:
    image = page.locator(PICTURE).first
    return image.get_attribute("src") if image.count() else None


@pytest.mark.timeout(240)
def test_runs_from_top_to_bottom_with_a_live_picture(lab, page):
    whole = notebook("01_quickstart").read_text()
    assert "run.wait(epochs=10)" in whole
    # its answers, and how long it trains for them, nbval looks at
    (lab.folder / "quickstart.ipynb").write_text(whole.replace("run.wait(epochs=10)", "run.wait(epochs=3)"))
    page.goto(lab.open("quickstart.ipynb"))
    run_all(page)
    seen: set[str] = set()

    def several_pictures() -> bool:
        source = picture(page)
        if source is not None and page.locator(STATE).get_by_text("training").count():
            seen.add(source)
        return len(seen) >= 3

    wait_for(several_pictures, 120, "the picture does not change while the run trains")
    last = page.locator(".jp-CodeCell").last.locator(STATE)

    last.get_by_text("training", exact=True).wait_for(timeout=120_000)
    last_picture = last.locator("img").first
    wait_for(last_picture.is_visible, 20, "the last dashboard shows no picture")
    first = last_picture.get_attribute("src")
    wait_for(lambda: last_picture.get_attribute("src") != first, 20, "the dashboard at the end is dead")
    assert is_in_view(last.get_by_role("button", name="Stop"))
    assert is_in_view(last_picture)
    assert page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']").count() == 0
    keep_screenshot(page, "quickstart-done")
    keep_screenshot(last, "dashboard")
