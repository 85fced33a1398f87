"""Two peers behind routers that let nobody in, and a relay that both can reach: they train together."""

from __future__ import annotations

import multiprocessing as mp
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import forked
import hivemind
import pytest
import tiny
import torch
from hivemind.dht import DHTNode
from hivemind.p2p import PeerID

import hivenb
from network.internet import Internet, why_not
from network.line import Line

pytestmark = pytest.mark.process

#: Seconds within which two peers find each other: a daemon knows after 15 that nobody reaches it.
PATIENCE = 120.0

RELAY, ANN, BOB = range(3)


@pytest.fixture(scope="module", autouse=True)
def allowed() -> None:
    if reason := why_not():
        pytest.skip(reason)


@contextmanager
def a_relay(internet: Internet, folder: Path) -> Iterator[str]:
    """``hivenb relay`` on the first host; its invite."""
    command = [sys.executable, "-u", "-m", "hivenb", "relay", "--folder", str(folder)]
    process = internet.popen(RELAY, command, stdout=-1, stderr=-2, text=True)
    seen = ""
    try:
        while not (found := re.search(r"hivenb://\S+", seen)):
            line = process.stdout.readline()
            assert line, seen
            seen += line
        yield found.group()
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


async def _routes(dht: hivemind.DHT, node: DHTNode) -> dict[str, list[str]]:
    return {
        PeerID(one.peer_id.to_bytes()).to_base58(): [str(a) for a in one.addrs] for one in await node.p2p.list_peers()
    }


def train(enter: Callable[[], None], told: Connection, invite: str) -> None:
    """A peer on a host, which tells now and then how it does, until it is told to end."""
    enter()
    torch.set_num_threads(1)
    with hivenb.Swarm.join(invite) as swarm:
        run = hivenb.TrainingRun(
            tiny.PacedModel(),
            tiny.loader(4096),
            swarm=swarm,
            options=hivenb.Options(target_batch_size=256, matchmaking_time=3.0),
            accelerator="cpu",
        )
        run.start()
        while not told.poll(1.0):
            sizes = run.history.snapshot().series.get("group_size")
            met = 0 if sizes is None else int((sizes.values == 2).sum())
            told.send((swarm.peer_id, met, swarm.dht.run_coroutine(_routes)))
        run.stop()


def last_told(connection: Connection) -> Any:
    assert connection.poll(PATIENCE), "the peer tells nothing"
    while connection.poll():
        said = connection.recv()
    return said


def test_peers_behind_routers_train_together_through_a_relay(tmp_path: Path) -> None:
    walled = {"delay": 0.02, "is_translated": True}
    peers: dict[int, Any] = {}
    with (
        Internet([Line(delay=0.01), Line(**walled), Line(**walled)]) as internet,
        a_relay(internet, tmp_path) as invite,
    ):
        try:
            for host in (ANN, BOB):
                here, there = mp.Pipe()
                peers[host] = here, forked.start(train, internet.enter_as(host), there, invite)
                there.close()
            end = time.monotonic() + PATIENCE
            while True:
                ann, bob = (last_told(here) for here, _ in peers.values())
                if min(ann[1], bob[1]) >= 3:
                    break
                assert time.monotonic() < end, (ann, bob)
            routes = ann[2].get(bob[0], []) + bob[2].get(ann[0], [])
            print("routes:", routes)
            assert routes
            assert all("p2p-circuit" in route for route in routes)
        finally:
            for here, process in peers.values():
                here.send("end")
                process.join(30)
                process.kill()
                process.join()
