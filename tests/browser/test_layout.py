"""The dashboard's boxes in JupyterLab: what is in view, wide enough and still, and what each field says of itself."""

from __future__ import annotations

import pytest

from hivenb.options import FIELDS
from hivenb.view.options_panel import shown

from .conftest import wait_for
from .test_live_control import DASHBOARD, notebook, what_is_cut_off
from .test_quickstart import keep_screenshot, run_all

pytestmark = [pytest.mark.browser, pytest.mark.slow]

CELLS = (
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
def dashboard(lab, browser):
    """In one notebook for both tests: to open it, with its kernel, takes longest."""
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.goto(lab.open(notebook(lab.folder, "layout.ipynb", CELLS)))
    run_all(page)
    shown = page.locator(DASHBOARD).first
    shown.wait_for(timeout=120_000)
    shown.locator("img").first.wait_for(timeout=20_000)
    yield shown
    page.close()


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
    assert page.locator(".jp-CodeCell").count() == len(CELLS), "no key has reached the notebook"
