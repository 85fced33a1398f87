"""A peer whose line was cut for so long that all have struck it off is there again when the line is whole."""

from __future__ import annotations

import multiprocessing as mp
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection

import forked
import hivemind
import pytest
from hivemind.dht import DHTNode
from hivemind.utils import get_dht_time

from hivenb.engine.network.dht import DHT
from network.internet import Internet, why_not
from network.line import Line

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

#: Seconds within which a node is struck off that does not answer, and found again.
PATIENCE = 90.0

FIRST, SECOND, CUT = range(3)


@pytest.fixture(scope="module", autouse=True)
def allowed() -> None:
    if reason := why_not():
        pytest.skip(reason)


async def _count(dht: hivemind.DHT, node: DHTNode) -> int:
    return len(node.protocol.routing_table.peer_id_to_uid)


async def _hang_up(dht: hivemind.DHT, node: DHTNode) -> None:
    """What the system does by itself after most of a minute without an answer."""
    for connected in await node.p2p.list_peers():
        await node.p2p._client.disconnect(connected.peer_id)


def serve(enter: Callable[[], None], connection: Connection, addresses: list[str]) -> None:
    """A node that stores and reads a record now and then, and tells how many it knows, until it is told to end."""
    enter()
    dht = DHT(start=True, host_maddrs=["/ip4/0.0.0.0/tcp/0"], initial_peers=addresses)
    try:
        own = [str(address) for address in dht.get_visible_maddrs(latest=True)]
        told = ""
        connection.send([one for one in own if "/127." not in one])
        while not connection.poll(0.2) or (told := connection.recv()) != "end":
            if told == "hang up":
                dht.run_coroutine(_hang_up)
                told = ""
            dht.store("key", "value", get_dht_time() + 60, subkey=dht.peer_id.to_base58(), return_future=True)
            dht.get("key", latest=True, return_future=True)
            connection.send(dht.run_coroutine(_count))
    finally:
        dht.shutdown()


@pytest.fixture
def three() -> Iterator[tuple[Internet, list[Connection]]]:
    with ExitStack() as ended:
        internet = ended.enter_context(Internet([Line(delay=0.02)] * 3))
        connections: list[Connection] = []
        addresses: list[str] = []
        for host in range(3):
            here, there = mp.Pipe()
            process = forked.start(serve, internet.enter_as(host), there, addresses)
            there.close()
            ended.callback(forked.end, here, process)
            assert here.poll(PATIENCE), "the node tells nothing"
            addresses = addresses or here.recv()
            connections.append(here)
        yield internet, connections


def wait_for_counts(connections: list[Connection], counts: list[int]) -> None:
    """Wait until each of them knows so many others."""
    end, now = time.monotonic() + PATIENCE, [-1] * len(counts)
    while now != counts:
        assert time.monotonic() < end, f"{now} instead of {counts}"
        for number, connection in enumerate(connections):
            while connection.poll(0.1):
                told = connection.recv()
                now[number] = told if isinstance(told, int) else now[number]


@pytest.mark.slow
def test_it_is_found_again_after_all_have_struck_it_off(three: tuple[Internet, list[Connection]]) -> None:
    internet, nodes = three
    wait_for_counts(nodes, [2, 2, 2])
    internet.change(CUT, is_cut=True)
    wait_for_counts(nodes, [1, 1, 0])
    for node in nodes:
        node.send("hang up")
    wait_for_counts(nodes[:2], [1, 1])
    internet.change(CUT, is_cut=False)
    began = time.monotonic()
    wait_for_counts(nodes, [2, 2, 2])
    print(f"found again {time.monotonic() - began:.0f} s after the line was whole")
