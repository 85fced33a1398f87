"""A comparison in JupyterLab: its table and curves are there while it works, and stay when a person interrupts it."""

from __future__ import annotations

import re

import pytest

from .conftest import wait_for
from .test_live_control import notebook
from .test_quickstart import keep_screenshot, run_all, switch_theme

pytestmark = [pytest.mark.browser, pytest.mark.long]

CELLS = (
    "import hivenb\nfrom hivenb import tasks\ntask = tasks.digits()",
    "options = hivenb.Options(target_batch_size=512, matchmaking_time=2.0)\n"
    'variants = {"synchronous": options, "half precision": options.replace(grad_compression="float16"),\n'
    '            "in the background": options.with_prerequisites(delay_grad_averaging=True)}\n'
    "comparison = hivenb.compare(variants, task.model, (task.train, task.validation), epochs=20, local_peers=1)\n"
    "comparison",
)

OUTPUT = ".jp-OutputArea-output .hivenb"


@pytest.mark.timeout(300)
def test_it_is_seen_at_work_and_an_interrupt_keeps_what_is_finished(lab, page) -> None:
    page.set_viewport_size({"width": 1400, "height": 900})
    page.goto(lab.open(notebook(lab.folder, "comparison.ipynb", CELLS)))
    run_all(page)
    shown = page.locator(OUTPUT)
    shown.get_by_text("waits for its turn").first.wait_for(timeout=60_000)
    assert shown.locator("img").count() == 0, "before anything has trained"
    shown.get_by_text(re.compile(r"epoch [2-9] of 20")).first.wait_for(timeout=120_000)
    curves = shown.locator("img").first
    first = curves.get_attribute("src")
    assert "synchronous" in curves.get_attribute("alt")
    wait_for(lambda: curves.get_attribute("src") != first, 60, "the curves do not go on")
    shown.get_by_text("1 of 3 trainings finished").wait_for(timeout=120_000)
    half = shown.locator("tr", has_text="half precision")
    half.get_by_text("epoch", exact=False).wait_for(timeout=60_000)
    wait_for(lambda: "epoch 0" not in half.inner_text(), 60, "the second one does not train")
    for theme in ("Light", "Dark"):
        if theme == "Dark":
            switch_theme(page, theme)
        for width in (1400, 1000):
            page.set_viewport_size({"width": width, "height": 900})
            keep_screenshot(page, f"compare-at-work-{theme.lower()}-{width}")
            cells = half.locator("td").evaluate_all("cells => cells.map(c => [c.scrollWidth, c.clientWidth])")
            assert all(needed <= there + 1 for needed, there in cells), "words lie on other words"

    page.get_by_role("menuitem", name="Kernel", exact=True).first.click()
    page.get_by_text("Interrupt Kernel", exact=True).first.click()
    half.get_by_text("interrupted", exact=False).wait_for(timeout=60_000)
    assert "finished" in shown.locator("tr", has_text="synchronous").inner_text()
    assert "not begun" in shown.locator("tr", has_text="in the background").inner_text()
    assert shown.count() == 1, "once, although the cell ends with the comparison"
    assert page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']").count() == 0
    keep_screenshot(page, "compare-interrupted")
