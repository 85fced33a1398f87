"""Texts that others have a part in, made to run in the page or to break it: they are shown as text, and nothing else.

A second peer, in a process of its own, has such a name. The run is called so, too, and what peers answer, in the log
and as the error on which the run ends, is such text of ten thousand characters.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
from collections.abc import Iterator
from pathlib import Path

import forked
import pytest

from hivenb.view.log_panel import MAX_LETTERS

from . import evil_peer
from .conftest import wait_for
from .test_live_control import DASHBOARD, Told, notebook, what_is_cut_off
from .test_quickstart import keep_screenshot, run_all

pytestmark = [pytest.mark.browser, pytest.mark.slow]

#: Without a dot, which hivemind allows in no name of a run.
EVIL = "<img src=x onerror=ran()>\"><script>ran()</script><b onmouseover='ran()'>\u202edlrow\x1b[2J\x07"

CELLS = (
    f"import hivenb, threading, time\nfrom hivenb import tasks\nfrom lightning import Callback\nEVIL = {EVIL!r}\n"
    "task = tasks.digits(hidden=8, blocks=1)\n"
    "swarm = hivenb.Swarm(public_name='Ann')\nopen('invite.txt', 'w').write(swarm.invite)",
    """
class FailsWhenTold(Callback):
    def on_train_batch_end(self, *args):
        time.sleep(0.05)  # leaves the cores to the browser
        if os.path.exists('fail'):
            raise RuntimeError(EVIL + 'e' * 10_000)
options = hivenb.Options(target_batch_size=4096, matchmaking_time=2.0, run_id=EVIL)
run = hivenb.TrainingRun(task.model, task.train, swarm=swarm, options=options, callbacks=[FailsWhenTold()])
dashboard = hivenb.Dashboard(run)
dashboard
""",
    """
import json, logging, os
logging.getLogger('hivemind.p2p').warning('Failed to call handler: %s', EVIL + 'l' * 10_000)
run.history.mark('option', EVIL)
def tell():
    while True:
        facts = {'state': run.status.state.value, 'peers': run.status.num_peers, 'text': dashboard.text()}
        with open('others.new', 'w') as f:
            json.dump(facts, f)
        os.replace('others.new', 'others.json')
        time.sleep(0.5)
threading.Thread(target=tell, daemon=True).start()
""",
)

#: In the page, before anything else: what runs is counted.
COUNTS = "window.runs = 0; window.ran = () => { window.runs += 1 }"

#: What of a text became a part of the page; images of the dashboard have data of their own.
BECAME_HTML = """root => [...root.querySelectorAll('script, img, b[onmouseover]')]
    .filter(e => e.tagName != 'IMG' || e.getAttribute('src') == 'x').map(e => e.outerHTML)"""

#: Elements that reach beyond the right edge of the dashboard, but for those in a box that scrolls or is cut off.
TOO_WIDE = """root => {
    const edge = root.getBoundingClientRect().right + 1;
    const isHeld = e => e !== root && (getComputedStyle(e).overflowX !== 'visible' || isHeld(e.parentElement));
    return [...root.querySelectorAll('*')].filter(e => e.offsetParent && e.getBoundingClientRect().right > edge)
        .filter(e => !isHeld(e.parentElement)).map(e => e.className + ' ' + e.getBoundingClientRect().right);
}"""


@contextlib.contextmanager
def evil(folder: Path) -> Iterator[None]:
    """That peer, as long as this lasts."""
    invite = folder / "invite.txt"
    wait_for(lambda: invite.exists() and invite.read_text(), 90, "the first cell did not run")
    ours, theirs = mp.Pipe()
    peer = forked.start(evil_peer.main, theirs, invite.read_text(), EVIL, str(folder / "evil.log"))
    theirs.close()
    with ours:
        try:
            yield
        finally:
            forked.end(ours, peer)


def is_harmless(dashboard) -> None:
    """Nothing has run, nothing of a text is a part of the page, and all is where it belongs."""
    assert dashboard.page.evaluate("window.runs") == 0
    assert dashboard.evaluate(BECAME_HTML) == []
    assert dashboard.evaluate(TOO_WIDE) == []
    assert not what_is_cut_off(dashboard)
    assert dashboard.bounding_box()["height"] < 1500


@pytest.mark.timeout(300)
def test_what_others_write_is_shown_as_text_and_nothing_of_it_runs(lab, page):
    told = Told(lab.folder, "others")  # what another test has written may lie in the same folder
    page.add_init_script(COUNTS)
    page.goto(lab.open(notebook(lab.folder, "others.ipynb", CELLS)))
    run_all(page)
    dashboard = page.locator(DASHBOARD).first
    dashboard.wait_for(timeout=90_000)
    assert page.evaluate("window.runs") == 0
    with evil(lab.folder):
        dashboard.get_by_role("button", name="Start").click()
        told.wait(lambda: told["peers"] == 2, 90, f"the other peer does not train; see {lab.folder / 'evil.log'}")
        for title in dashboard.get_by_role("tab").all_inner_texts():
            dashboard.get_by_role("tab", name=title.strip()).click()
            is_harmless(dashboard)
            keep_screenshot(dashboard, f"others-{title.strip().lower()}")
        dashboard.get_by_role("tab", name="Peers").click()
        name = dashboard.locator("td", has_text="<img src=x onerror=ran()>").first
        name.wait_for(timeout=30_000)
        assert "\u202e" not in name.inner_text()
        name.hover()
        is_harmless(dashboard)

        dashboard.get_by_role("tab", name="Log").click()
        logged = dashboard.locator(".hivenb-log", has_text="Failed to call handler").first
        logged.wait_for(timeout=20_000)
        assert r"\u202edlrow\x1b[2J\x07" in logged.inner_text()
        assert "l" * (MAX_LETTERS + 1) not in logged.inner_text()
        is_harmless(dashboard)

        (lab.folder / "fail").touch()
        told.wait(lambda: told["state"] == "failed", 60, "the run did not fail")
        error = dashboard.locator(".hivenb-message summary", has_text="<img src=x").first
        error.wait_for(timeout=20_000)
        assert r"\u202edlrow\x1b[2J\x07" in error.inner_text()
        is_harmless(dashboard)
        assert dashboard.get_by_role("tab", name="Peers").bounding_box()["y"] - dashboard.bounding_box()["y"] < 900
        keep_screenshot(dashboard, "others-failed")

    text = told["text"]
    assert "failed: RuntimeError: <img src=x" in text
    assert not [one for one in text if one != "\n" and not one.isprintable()]
    assert page.evaluate("window.runs") == 0
