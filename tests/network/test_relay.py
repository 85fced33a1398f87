"""Two peers behind routers that let nobody in, and a relay that both can reach: they train together.

So they do when the relay has been started again.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

import forked
import hivemind
import pytest
import tiny
import torch
from hivemind.dht import DHTNode
from hivemind.p2p import PeerID

import hivenb
from hivenb.app import cli
from hivenb.engine.network.addresses import Reach
from network.internet import Internet, why_not
from network.line import Line

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

#: Seconds within which two peers find each other, also after the relay was gone.
PATIENCE = 180.0

RELAY, ANN, BOB = range(3)


@pytest.fixture(scope="module", autouse=True)
def allowed() -> None:
    if reason := why_not():
        pytest.skip(reason)


def relay(enter: Callable[[], None], told: Connection, folder: str) -> None:
    """``hivenb relay`` on a host; all that it prints goes to a connection."""
    enter()
    for number in (1, 2):
        os.dup2(told.fileno(), number)
    told.close()
    sys.stdout, sys.stderr = open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115 - to its end
    sys.exit(cli.main(["relay", "--folder", folder]))


@contextmanager
def a_relay(internet: Internet, folder: Path) -> Iterator[str]:
    """``hivenb relay`` on the first host; its invite."""
    here, there = mp.Pipe(duplex=False)
    process = forked.start(relay, internet.enter_as(RELAY), there, str(folder))
    there.close()
    seen = ""
    try:
        with here, open(here.fileno(), closefd=False) as said:
            while not (found := re.search(r"hivenb://\S+", seen)):
                line = said.readline()
                assert line, seen
                seen += line
            yield found.group()
            process.terminate()
            process.join(30)
            assert process.exitcode == 0
    finally:
        process.kill()
        process.join()


@dataclass(frozen=True)
class Told:
    """By a peer, of itself.

    :param peer_id: its id
    :param met: rounds in which it was with the other one
    :param routes: addresses of its connections, by the ids of the others
    :param words: how the peers of its run are connected, by their ids
    """

    peer_id: str
    met: int
    routes: dict[str, list[str]]
    words: dict[str, Reach]


async def _routes(dht: hivemind.DHT, node: DHTNode) -> dict[str, list[str]]:
    return {
        PeerID(one.peer_id.to_bytes()).to_base58(): [str(a) for a in one.addrs] for one in await node.p2p.list_peers()
    }


def train(
    enter: Callable[[], None], told: Connection, invite: str, settings: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """A peer on a host, which tells now and then how it does, until it is told to end.

    :param settings: of its swarm
    """
    enter()
    torch.set_num_threads(1)
    with hivenb.Swarm.join(invite, **settings) as swarm:
        run = hivenb.TrainingRun(
            tiny.in_large_batches(tiny.PacedModel()),
            tiny.large_batches(),
            swarm=swarm,
            options=hivenb.Options(target_batch_size=256, matchmaking_time=3.0),
            accelerator="cpu",
        )
        run.start()
        while not told.poll(1.0):
            sizes = run.history.snapshot().series.get("group_size")
            met = 0 if sizes is None else int((sizes.values == 2).sum())
            words = {member.peer.peer_id: member.route for member in run.members}
            with suppress(Exception):  # its daemon is just started anew
                told.send(Told(swarm.peer_id, met, swarm.dht.run_coroutine(_routes), words))
        run.stop()


def last_told(connection: Connection) -> Told:
    assert connection.poll(PATIENCE), "the peer tells nothing"
    while connection.poll():
        said: Told = connection.recv()
    return said


def wait_for_rounds(connections: Sequence[Connection], more: int) -> list[Told]:
    """Wait until both have met so many times from now on."""
    before = [last_told(one).met for one in connections]
    end = time.monotonic() + PATIENCE
    while True:
        now = [last_told(one) for one in connections]
        if all(one.met - met >= more for one, met in zip(now, before, strict=True)):
            return now
        assert time.monotonic() < end, now


@pytest.mark.slow
def test_peers_behind_routers_train_together_through_a_relay(tmp_path: Path) -> None:
    walled = {"delay": 0.02, "is_translated": True}
    with ExitStack() as ended:
        internet = ended.enter_context(Internet([Line(delay=0.01), Line(**walled), Line(**walled)]))
        connections = []
        with a_relay(internet, tmp_path) as invite:
            for host in (ANN, BOB):
                here, there = mp.Pipe()
                process = forked.start(train, internet.enter_as(host), there, invite)
                there.close()
                ended.callback(forked.end, here, process)
                connections.append(here)
            ann, bob = wait_for_rounds(connections, 3)
            routes = ann.routes.get(bob.peer_id, []) + bob.routes.get(ann.peer_id, [])
            print("routes:", routes)
            assert routes
            assert all("p2p-circuit" in route for route in routes)
            assert set((ann.words | bob.words).values()) == {Reach.RELAYED}
        began = time.monotonic()
        with a_relay(internet, tmp_path):
            wait_for_rounds(connections, 3)
            print(f"together again {time.monotonic() - began:.0f} s after the relay was started again")
