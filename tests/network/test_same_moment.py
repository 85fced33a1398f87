"""Two peers that learn of each other at the same moment, far apart, reach each other at once."""

from __future__ import annotations

import asyncio
import multiprocessing as mp
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import forked
import pytest
from hivemind.p2p import P2PContext, P2PDaemonError, PeerID
from hivemind.proto import dht_pb2

from hivenb.engine.network.daemon import TiedP2P
from network.internet import Internet, why_not
from network.line import Line

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

#: Seconds for a daemon to start, and for an answer.
PATIENCE = 60.0

#: A quarter of 100 ms there and back.
AFAR = Line(delay=0.025)

#: Two of them, one pair after the other: some pairs would miss each other's moment.
PAIRS = 4

#: All of TCP, as where a firewall lets no QUIC pass.
LISTENS: dict[str, Any] = {"host_maddrs": ["/ip4/0.0.0.0/tcp/0"], "nat_port_map": False, "auto_nat": False}


@pytest.fixture(scope="module", autouse=True)
def allowed() -> None:
    if reason := why_not():
        pytest.skip(reason)


async def answer(request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
    return dht_pb2.PingResponse(available=True)


def be_there(enter: Callable[[], None], connection: Connection, known: list[str]) -> None:
    """Tell its id and addresses, call whom it is told to, and tell what has come of it, until it is told to end."""
    enter()
    asyncio.run(_be_there(connection, known))


async def _be_there(connection: Connection, known: list[str]) -> None:
    p2p = await TiedP2P.create(initial_peers=known, **LISTENS)
    await p2p.add_protobuf_handler("ping", answer, dht_pb2.PingRequest)
    connection.send((p2p.peer_id.to_base58(), [str(one) for one in await p2p.get_visible_maddrs()]))
    while (other := await asyncio.to_thread(connection.recv)) != "end":
        connection.send(await call(p2p, PeerID.from_base58(other)))
    await p2p.shutdown()


async def call(p2p: TiedP2P, other: PeerID) -> bool | str:
    """Whether a peer answers, as soon as it is known where it is; otherwise why not."""
    while True:
        try:
            asked = p2p.call_protobuf_handler(other, "ping", dht_pb2.PingRequest(), dht_pb2.PingResponse)
            return bool((await asyncio.wait_for(asked, PATIENCE)).available)
        except P2PDaemonError as e:
            if not any(unknown in str(e) for unknown in ("routing: not found", "failed to find any peer")):
                return str(e)
            await asyncio.sleep(0.05)


def told(connection: Connection) -> Any:
    assert connection.poll(PATIENCE)
    return connection.recv()


@pytest.mark.slow
def test_two_that_dial_each_other_at_the_same_moment_both_get_through() -> None:
    with ExitStack() as ended:
        internet = ended.enter_context(Internet([AFAR] * (1 + 2 * PAIRS)))

        def begin(host: int, known: list[str]) -> Connection:
            here, there = mp.Pipe()
            process = forked.start(be_there, internet.enter_as(host), there, known)
            there.close()
            ended.callback(forked.end, here, process)
            return here

        _, known = told(begin(0, []))
        outside = [address for address in known if "127.0.0.1" not in address]
        came_to = []
        for host in range(1, 1 + 2 * PAIRS, 2):
            one, other = begin(host, outside), begin(host + 1, outside)
            (own, _), (others, _) = told(one), told(other)
            one.send(others)
            other.send(own)
            came_to.append((told(one), told(other)))
        print(came_to)
        assert came_to == [(True, True)] * PAIRS
