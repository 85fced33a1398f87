"""A pointer over the charts in JupyterLab: values under it, a window by wheel and drag, the legend, files to save.

And the dashboard's boxes: what is in view, wide enough and still, and what each field says of itself.
"""

from __future__ import annotations

import csv
import io
import json
import re
from typing import Any

import pytest

from hivenb.options import FIELDS
from hivenb.view.options_panel import shown

from .conftest import wait_for
from .test_live_control import DASHBOARD, notebook, what_is_cut_off
from .test_quickstart import keep_screenshot, run_all, switch_theme

pytestmark = [pytest.mark.browser, pytest.mark.slow]

#: Five minutes of a run, written by hand into its history, so that every value is known.
CELLS = (
    """
import math, random
import hivenb
from hivenb import tasks
task = tasks.digits()
swarm = hivenb.Swarm()
data = (task.train, task.validation)
run = hivenb.TrainingRun(task.model, data, swarm=swarm, options=hivenb.Options(target_batch_size=2048))
random.seed(0)
record, mark = run.history.record, run.history.mark
mark("run", "started", time=1000.0)
for second in range(301):
    now, epoch = 1000.0 + second, second // 10
    noise = 0.25 * random.random() * math.exp(-second / 200)
    record("loss", 2.3 * math.exp(-second / 90) + noise, epoch=epoch, samples=64 * second, time=now)
    record("peers", 1 + (second > 60) + (second > 200), epoch=epoch, time=now)
    record("samples_per_second", 130 + second % 7, epoch=epoch, time=now)
    record("swarm_samples_per_second", 400 + second % 9, epoch=epoch, time=now)
    record("memory", 5e8 + 1e6 * second, epoch=epoch, time=now)
    record("bytes_sent", 1.2e6 * epoch, epoch=epoch, time=now)
    record("bytes_received", 0.9e6 * epoch, epoch=epoch, time=now)
    if second and second % 10 == 0:
        record("stalled_seconds", 2.0, epoch=epoch, time=now)
        record("waiting_seconds", 0.5 * (second == 150), epoch=epoch, time=now)
    if second and second % 50 == 0:
        record("val_loss", round(2.5 * math.exp(-second / 90), 3), epoch=epoch, time=now)
        record("val_acc", 1 - 0.8 * math.exp(-second / 90), epoch=epoch, time=now)
mark("option", "gradients: float16 instead of none, and the target batch size: 512 instead of 2048", time=1120.0)
mark("peer", "peer QmXyz joined", time=1061.0)
""",
    """
dashboard = hivenb.Dashboard(run)
dashboard
""",
)


class Charts:
    """The picture in the page, and what it says of itself."""

    def __init__(self, page: Any, dashboard: str = DASHBOARD):
        self.page = page
        self.root = page.locator(f"{dashboard} .hivenb-picture").first
        self.image = self.root.locator("img.hivenb-charts")
        self.tip = self.root.locator(".hivenb-tip")

    @property
    def facts(self) -> dict[str, Any]:
        written = self.root.locator(".hivenb-under-pointer")
        return json.loads(written.text_content()) if written.count() else {"panels": []}

    def panel(self, title: str) -> dict[str, Any]:
        return next(panel for panel in self.facts["panels"] if panel["title"] == title)

    def line(self, title: str, word: str) -> dict[str, Any]:
        return next(line for line in self.panel(title)["lines"] if line["word"] == word)

    def across(self, title: str) -> tuple[float, float]:
        start, end = self.panel(title)["across"]
        return start, end

    def at(self, title: str, seconds: float, up: float = 0.5) -> tuple[float, float]:
        """Where in the page a panel shows a moment."""
        panel, box = self.panel(title), self.image.bounding_box()
        (left, top, right, bottom), (start, end) = panel["box"], panel["across"]
        across = left + (seconds - start) / (end - start) * (right - left)
        return box["x"] + across * box["width"], box["y"] + (bottom - up * (bottom - top)) * box["height"]

    def middle(self, share: list[float]) -> tuple[float, float]:
        box, (left, top, right, bottom) = self.image.bounding_box(), share
        return box["x"] + (left + right) / 2 * box["width"], box["y"] + (top + bottom) / 2 * box["height"]

    def source(self) -> str:
        return self.image.get_attribute("src")

    def values(self, title: str, word: str, seconds: float) -> list[float]:
        """What a line has at a moment, and at its neighbours: a pointer is between pixels."""
        line = self.line(title, word)
        place = min(range(len(line["x"])), key=lambda i: abs(line["x"][i] - seconds))
        return line["y"][max(0, place - 1) : place + 2]

    def says(self, title: str, seconds: float, *patterns: str) -> str:
        """Wait until a pointer at that moment is told such words."""

        def told() -> str | None:
            # again, since the picture may still become wider or narrower
            self.page.mouse.move(*self.at(title, seconds), steps=3)
            words = self.tip.inner_text() if self.tip.is_visible() else ""
            return words if words and all(re.search(pattern, words) for pattern in patterns) else None

        return wait_for(told, 10, f"at {seconds} s of {title!r}, the pointer is not told {patterns}")

    def wait(self, condition: Any, failure: str) -> None:
        wait_for(condition, 30, failure)

    def appear(self) -> None:
        """Wait until they are there, and the script with them."""
        self.image.wait_for(timeout=120_000)
        self.wait(lambda: "training" in (self.image.get_attribute("alt") or ""), "the script does not run")
        self.image.scroll_into_view_if_needed()


@pytest.fixture(scope="module")
def opened(lab, browser):
    """Opens a notebook in place of the one before, with its kernel: the imports take longest."""
    pages: list[Any] = []

    def instead(cells: tuple[str, ...]) -> Any:
        while pages:
            pages.pop().close()
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        pages.append(page)
        page.goto(lab.open(notebook(lab.folder, "charts.ipynb", cells)))
        run_all(page)
        return page

    yield instead
    for page in pages:
        page.close()


@pytest.fixture(scope="module")
def charts(opened):
    """Of one notebook for all tests of them."""
    shown = Charts(opened(CELLS))
    shown.appear()
    return shown


def test_it_answers_a_pointer(charts: Charts) -> None:
    page = charts.page

    # values, and the whole text of a mark
    training = "|".join(f"{value:.3f}" for value in charts.values("Loss", "training", 100.0))
    told = charts.says("Loss", 100.0, rf"training\s+({training})", r"validation\s+0\.823", r"1 min (39|40|41) s")
    assert "smoothed" in told
    keep_screenshot(page, "pointer-1-hover")
    charts.says("Time", 105.0, r"computing\s+80\.0 %", r"averaging\s+20\.0 %")
    memory = "|".join(f"{value / 1e6:.0f}" for value in charts.values("Memory", "Memory", 100.0))
    charts.says("Memory", 100.0, rf"({memory}) MB")
    charts.says("Loss", 120.0, "gradients: float16 instead of none, and the target batch size: 512 instead of 2048")
    keep_screenshot(page, "pointer-2-mark")
    page.mouse.move(5, 5)
    charts.tip.wait_for(state="hidden", timeout=5_000)

    # a wheel goes into time, a double click comes back
    before, first = charts.across("Loss"), charts.source()
    page.mouse.move(*charts.at("Loss", 100.0))
    for _ in range(4):
        page.mouse.wheel(0, -120)
    charts.wait(lambda: charts.across("Loss") != before and charts.source() != first, "the wheel does nothing")
    start, end = charts.across("Peers")
    assert 0 < start < 100 < end < 250, "around the pointer, in all charts of time"
    assert (start, end) == charts.across("Loss")
    assert "from " in charts.image.get_attribute("alt")
    keep_screenshot(page, "pointer-3-wheel")
    page.mouse.dblclick(*charts.at("Loss", (start + end) / 2))
    charts.wait(lambda: charts.across("Loss") == before, "a double click does not come back")

    # a drag takes what lies between
    page.mouse.move(*charts.at("Samples/s", 150.0))
    page.mouse.down()
    page.mouse.move(*charts.at("Samples/s", 195.0), steps=5)
    keep_screenshot(page, "pointer-4-drag")
    page.mouse.up()
    charts.wait(lambda: charts.across("Loss") != before, "a drag does nothing")
    assert charts.across("Loss") == pytest.approx((150.0, 195.0), abs=3.0)
    charts.says("Loss", 175.0, "2 min 5[456] s")
    keep_screenshot(page, "pointer-5-zoomed")

    # what is shown, as a table
    with page.expect_download() as saving:
        page.get_by_role("button", name="CSV").click()
    assert saving.value.suggested_filename == "hivenb-charts.csv"
    rows = list(csv.DictReader(io.StringIO(saving.value.path().read_text())))
    start, end = charts.across("Loss")
    assert all(start <= float(row["seconds"]) <= end for row in rows)
    peers = [float(row["value"]) for row in rows if row["chart"] == "Peers"]
    assert set(peers) == {2.0}
    assert 40 <= len(peers) <= 50
    memory = {float(row["seconds"]): float(row["value"]) for row in rows if row["chart"] == "Memory"}
    assert memory == {second: 5e8 + 1e6 * second for second in memory}
    assert len(memory) == len(peers)
    with page.expect_download() as saving:
        page.get_by_role("button", name="PNG").click()
    assert saving.value.path().read_bytes().startswith(b"\x89PNG")

    charts.root.get_by_role("button", name="show all").click()
    charts.wait(lambda: charts.across("Loss") == before, "the button does not come back")

    # a series is switched off at the legend, and on again
    page.mouse.click(*charts.middle(charts.line("Loss", "validation")["legend"]))
    charts.wait(lambda: charts.line("Loss", "validation")["hidden"], "it is not switched off")
    assert "validation" not in charts.says("Loss", 101.0, "training")
    assert "validation" not in charts.image.get_attribute("alt").split("Validation accuracy")[0]
    keep_screenshot(page, "pointer-6-switched-off")
    page.mouse.click(*charts.middle(charts.line("Loss", "validation")["legend"]))
    charts.wait(lambda: not charts.line("Loss", "validation")["hidden"], "it is not switched on")

    # the smoothing is chosen
    assert charts.line("Loss", "training")["trend"]
    page.locator(DASHBOARD).first.get_by_label("smoothing", exact=True).select_option("none")
    charts.wait(lambda: charts.line("Loss", "training")["trend"] is None, "it is still smoothed")
    assert "smoothed" not in charts.says("Loss", 100.0, "training")


def test_a_page_that_is_scrolled_does_not_stop_at_the_charts(charts: Charts) -> None:
    page, before = charts.page, charts.across("Loss")
    page.set_viewport_size({"width": 1000, "height": 500})
    scrolled = page.locator(".jp-WindowedPanel-outer").first
    scrolled.evaluate("panel => { panel.scrollTop = 0; }")
    x = charts.at("Loss", 100.0)[0]
    page.mouse.move(x, 300)
    at = scrolled.evaluate("panel => panel.scrollTop")
    for _ in range(8):
        page.mouse.wheel(0, 100)
        page.wait_for_timeout(60)
    assert scrolled.evaluate("panel => panel.scrollTop") > at + 300
    assert charts.across("Loss") == before


def test_it_answers_in_light_and_dark_wide_and_narrow(charts: Charts) -> None:
    page = charts.page
    for theme in ("Light", "Dark"):
        if theme == "Dark":
            switch_theme(page, theme)
        for width in (1400, 1000):
            look = f"{theme.lower()}-{width}"
            page.set_viewport_size({"width": width, "height": 900})
            charts.image.scroll_into_view_if_needed()
            for title in ("Loss", "Memory"):
                charts.says(title, 295.0, "4 min 5")
                tip, image = charts.tip.bounding_box(), charts.image.bounding_box()
                assert tip["x"] >= image["x"]
                assert tip["x"] + tip["width"] <= image["x"] + image["width"] + 1
            charts.says("Loss", 120.0, "training", "instead of 2048")
            keep_screenshot(page, f"pointer-hover-{look}")
            assert not what_is_cut_off(page.locator(DASHBOARD).first)
            page.mouse.wheel(0, -400)
            charts.wait(lambda: charts.facts["zoomed"], "the wheel does nothing")
            charts.says("Peers", 120.0, "2 min 0 s")
            keep_screenshot(page, f"pointer-zoom-{look}")
            page.mouse.dblclick(*charts.at("Peers", 120.0))
            charts.wait(lambda: not charts.facts["zoomed"], "a double click does not come back")


# -- the boxes -----------------------------------------------------------------------------------------------------

READY = (
    "import hivenb\nfrom hivenb import tasks\ntask = tasks.digits()\nswarm = hivenb.Swarm()",
    "options = hivenb.Options(target_batch_size=600, run_id='digits')\n"
    "run = hivenb.TrainingRun(task.model, (task.train, task.validation), swarm=swarm, options=options, max_epochs=20)\n"
    "hivenb.Dashboard(run)",
    # something to scroll to, so that the cell of the dashboard can be brought to the top
    "print('\\n' * 60)",
)

#: Boxes that scroll although nothing needs it, or sideways at all; a long log and a script may be scrolled down.
SCROLLBARS = """root => [...root.querySelectorAll('*')].filter(e => e.offsetParent && e.clientHeight > 0)
    .filter(e => ['auto', 'scroll'].includes(getComputedStyle(e).overflowX) && e.scrollWidth > e.clientWidth ||
                 ['auto', 'scroll'].includes(getComputedStyle(e).overflowY) && e.scrollHeight > e.clientHeight &&
                 !e.matches('.hivenb-log, .hivenb-code pre'))
    .map(e => e.className + ' ' + e.scrollWidth + '/' + e.clientWidth + ' ' + e.scrollHeight + '/' + e.clientHeight)"""

#: Fields that do not show all of their text, or are narrower than six digits.
NARROW = """root => {
    const pen = document.createElement('canvas').getContext('2d');
    const said = e => e.options ? e.options[e.selectedIndex].text : e.value || e.placeholder;
    const room = e => {
        pen.font = getComputedStyle(e).font;
        return pen.measureText(said(e)).width + (e.options ? 24 : 16);
    };
    return [...root.querySelectorAll('input[type=text], select')].filter(e => e.offsetParent && !e.readOnly)
        .filter(e => room(e) > e.clientWidth || !e.options && e.clientWidth < 70)
        .map(e => said(e) + ': ' + e.clientWidth + ', and not ' + room(e));
}"""


@pytest.fixture(scope="module")
def dashboard(opened):
    """Of a run that is ready, in one notebook for all tests of it."""
    found = opened(READY).locator(DASHBOARD).first
    found.wait_for(timeout=120_000)
    found.locator("img").first.wait_for(timeout=20_000)
    return found


def tab_names(dashboard) -> list[str]:
    return [name.strip() for name in dashboard.get_by_role("tab").all_inner_texts()]


def tabs_at(dashboard) -> float:
    """How far below the dashboard's upper edge the tabs begin."""
    tab = dashboard.get_by_role("tab").first.bounding_box()
    return tab["y"] - dashboard.bounding_box()["y"]


def each_tab(dashboard):
    for name in tab_names(dashboard):
        dashboard.get_by_role("tab", name=name).click()
        yield name
    dashboard.get_by_role("tab", name="Peers").click()


def test_all_is_in_view_wide_enough_and_still(dashboard):
    page = dashboard.page
    # the cell with its code at the top of the notebook, as after a click into it
    cell = page.locator(".jp-CodeCell", has=page.locator(".hivenb")).first
    cell.evaluate("e => e.scrollIntoView({block: 'start'})")
    wait_for(lambda: abs(cell.bounding_box()["y"] - page.locator(".jp-WindowedPanel-outer").bounding_box()["y"]) < 60,
             10, "the cell does not come to the top")  # fmt: skip
    panel = page.locator(".jp-Notebook").bounding_box()
    for tab in dashboard.get_by_role("tab").all():
        box = tab.bounding_box()
        assert box["y"] + box["height"] <= panel["y"] + panel["height"], "the tabs are in view"
    keep_screenshot(page, "layout-1400")
    still = tabs_at(dashboard)

    # no hole below the charts
    picture = dashboard.locator("img").first.bounding_box()
    tabs = dashboard.get_by_role("tab").first.bounding_box()
    assert 0 <= tabs["y"] - picture["y"] - picture["height"] < 40

    for width in (1400, 1000):
        page.set_viewport_size({"width": width, "height": 900})
        for name in each_tab(dashboard):
            wait_for(lambda: not dashboard.evaluate(SCROLLBARS), 10, f"a scrollbar in {name}")
            wait_for(lambda: not dashboard.evaluate(NARROW), 10, f"a narrow field in {name}")
            wait_for(lambda: not what_is_cut_off(dashboard), 10, f"something is cut off in {name}")
        keep_screenshot(page, f"layout-{width}")
    page.set_viewport_size({"width": 1400, "height": 900})
    wait_for(lambda: abs(tabs_at(dashboard) - still) < 2, 10, "the tabs are not where they were at this width")

    # messages have their place already
    dashboard.get_by_label("optimizer step in background").check()
    dashboard.get_by_text("Also switched on").first.wait_for(timeout=20_000)
    assert abs(tabs_at(dashboard) - still) < 2
    field = dashboard.get_by_label("target batch size")
    field.fill("-5")
    field.press("Tab")
    dashboard.locator(".hivenb-trouble", has_text="target_batch_size").wait_for(timeout=20_000)
    assert abs(tabs_at(dashboard) - still) < 2
    keep_screenshot(page, "layout-messages")


def test_each_field_says_what_it_means_to_pointer_keyboard_and_finger(dashboard):
    page = dashboard.page
    names = [name for names in shown().values() for name in names]
    titles = dashboard.locator(".hivenb-help > summary").evaluate_all("all => all.map(e => e.title)")
    for name in names:
        assert any(title.startswith(FIELDS[name].help) and f"({name})" in title for title in titles), name

    text = dashboard.get_by_text("(delay_state_averaging)")
    field = page.get_by_label("state averaging in background")
    mark = dashboard.locator(".hivenb-helped", has=field).locator("summary")
    assert not text.is_visible()
    mark.focus()
    page.keyboard.press("Enter")
    text.wait_for(timeout=5_000)
    keep_screenshot(page, "layout-help")
    page.keyboard.press("Enter")
    text.wait_for(state="hidden", timeout=5_000)

    dashboard.get_by_role("tab", name="More switches").click()
    helper = dashboard.locator(".hivenb-helped", has=page.get_by_text("helper only", exact=True)).first
    helper.locator("summary").click()
    dashboard.get_by_text("(auxiliary)").wait_for(timeout=5_000)
    keep_screenshot(page, "layout-helper-only")
    assert page.locator(".jp-CodeCell").count() == len(READY), "no key has reached the notebook"
