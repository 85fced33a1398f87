"""The peers panel says in words how each peer is connected: directly, through a relay, only outwards.

The notebook's kernel and four peers, one of them a relay, are hosts of an internet of this machine.
"""

from __future__ import annotations

import json
import multiprocessing as mp
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import forked
import pytest
from network import test_relay
from network.internet import Internet, why_not
from network.line import Line

from hivenb.engine.network.addresses import Reach

from .conftest import wait_for
from .test_live_control import DASHBOARD, notebook
from .test_quickstart import keep_screenshot, run_all

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.slow]

RELAY, KERNEL, TRANSLATED, OPEN, CLIENT = range(5)

CELLS = (
    """
import sys
sys.path[:0] = {paths}
import hivenb, namespaces, tiny
namespaces.enter({space!r})  # what this thread starts from now on is on another host
swarm = hivenb.Swarm.join({invite!r}, public_name="this notebook")
run = hivenb.TrainingRun(
    tiny.PacedModel(), tiny.loader(4096), swarm=swarm,
    options=hivenb.Options(target_batch_size=256, matchmaking_time=3.0), accelerator="cpu",
)
dashboard = hivenb.Dashboard(run)
dashboard
""",
    "run.start()",
)


@pytest.fixture
def invite(tmp_path: Path) -> Iterator[tuple[Internet, str]]:
    """An internet, and the way into a swarm of three peers and a relay there."""
    if reason := why_not():
        pytest.skip(reason)
    walled = Line(delay=0.02, is_translated=True)
    with ExitStack() as ended:
        internet = ended.enter_context(Internet([Line(delay=0.01), walled, walled, Line(delay=0.02), walled]))
        way_in = ended.enter_context(test_relay.a_relay(internet, tmp_path / "relay"))
        for host, name, client_mode in ((TRANSLATED, "at home", None), (OPEN, "rented", None), (CLIENT, "phone", True)):
            here, there = mp.Pipe()
            settings = {"public_name": name, "client_mode": client_mode}
            process = forked.start(test_relay.train, internet.enter_as(host), there, way_in, settings)
            there.close()
            ended.callback(forked.end, here, process)
        yield internet, way_in


@pytest.mark.timeout(400)
def test_how_each_peer_is_connected_is_said_in_words(lab, page, invite):
    internet, way_in = invite
    tests = Path(__file__).resolve().parents[1]
    facts = {"paths": json.dumps([str(tests)]), "space": internet.enter_as(KERNEL).args[0], "invite": way_in}
    cells = tuple(cell.format(**facts) for cell in CELLS)
    page.goto(lab.open(notebook(lab.folder, "routes.ipynb", cells)))
    run_all(page)
    dashboard = page.locator(DASHBOARD).first
    dashboard.wait_for(timeout=120_000)
    dashboard.get_by_role("tab", name="Peers").click()
    words = {
        "at home": Reach.RELAYED,
        "rented": Reach.DIRECTLY,
        "phone": Reach.NOT,
        "this notebook": Reach.RELAYED,
    }
    for name, reach in words.items():
        row = dashboard.locator("tr", has_text=name).first
        row.wait_for(timeout=120_000)
        wait_for(
            lambda row=row, reach=reach: reach.value in row.inner_text(),
            120,
            f"{name} is not said to be {reach.value!r}",
        )
    keep_screenshot(dashboard, "routes")
