"""A peer finds out from those it joins whether they reach it, and is a client if they do not."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import forked
import pytest

from hivenb.engine.network.access.tokens import Secret
from hivenb.engine.network.addresses import Reach
from hivenb.engine.network.dht import DHT
from network.internet import Internet, why_not
from network.line import Line

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

#: Seconds within which a peer has joined, and found out: two starts of a daemon, and an attempt to be reached.
PATIENCE = 90.0

FIRST, OPEN, WALLED, TRANSLATED = range(4)

Open = Callable[..., Any]


@pytest.fixture(scope="module", autouse=True)
def allowed() -> None:
    if reason := why_not():
        pytest.skip(reason)


def serve(enter: Callable[[], None], connection: Connection, settings: dict[str, Any]) -> None:
    """A peer on a host, which tells how it is reached, until it is told to end."""
    enter()
    dht = DHT(start=True, host_maddrs=["/ip4/0.0.0.0/tcp/0"], **settings)
    try:
        addresses = [str(address) for address in dht.get_visible_maddrs(latest=True)]
        connection.send((dht.reach, dht.client_mode, [one for one in addresses if "/127." not in one]))
        connection.poll(None)
    finally:
        dht.shutdown()


@pytest.fixture
def peers() -> Iterator[Open]:
    """Opens peers on hosts, and gives what each tells: how it is reached, whether it is a client, its addresses."""
    with ExitStack() as ended:

        def join(internet: Internet, host: int, **settings: Any) -> Any:
            here, there = mp.Pipe()
            process = forked.start(serve, internet.enter_as(host), there, settings)
            there.close()
            ended.callback(process.kill)
            ended.callback(process.join, PATIENCE)
            ended.callback(here.close)  # which lets it end
            assert here.poll(PATIENCE), "the peer tells nothing"
            return here.recv()

        yield join


@pytest.mark.slow
def test_in_a_private_swarm_members_find_out_too(peers: Open) -> None:
    secret = {"secret": Secret.random()}
    with Internet([Line(delay=0.02), Line(delay=0.02), Line(is_walled=True)]) as internet:
        *_, addresses = peers(internet, FIRST, client_mode=None, **secret)
        joining = {"client_mode": None, "initial_peers": addresses, **secret}
        assert peers(internet, OPEN, **joining)[:2] == (Reach.DIRECTLY, False)
        assert peers(internet, WALLED, **joining)[:2] == (Reach.NOT, True)


@pytest.mark.slow
def test_who_is_not_reached_is_a_client_and_who_says_how_it_is_reached_is_asked_nothing(peers: Open) -> None:
    lines = [Line(delay=0.02), Line(delay=0.02), Line(is_walled=True), Line(is_translated=True)]
    with Internet(lines) as internet:
        reach, is_client, addresses = peers(internet, FIRST, client_mode=None)
        assert (reach, is_client) == (Reach.UNKNOWN, False), "there was nobody whom it could have asked"
        joining = {"client_mode": None, "initial_peers": addresses}
        with ThreadPoolExecutor() as at_once:
            opened = {host: at_once.submit(peers, internet, host, **joining) for host in (OPEN, WALLED, TRANSLATED)}
        found = {host: of_host.result() for host, of_host in opened.items()}
        assert found[OPEN][:2] == (Reach.DIRECTLY, False)
        assert found[WALLED][:2] == found[TRANSLATED][:2] == (Reach.NOT, True)
        reach, is_client, _ = peers(internet, WALLED, initial_peers=addresses)
        assert (reach, is_client) == (Reach.UNKNOWN, False), "as plain hivemind, which takes it that it is reached"
        announced = [f"/ip4/{internet.address(WALLED)}/tcp/4001"]
        told = {"initial_peers": addresses, "client_mode": None, "announce_maddrs": announced}
        assert peers(internet, WALLED, **told)[:2] == (Reach.UNKNOWN, False)
        told = {"initial_peers": addresses, "client_mode": None, "is_walled": True}
        assert peers(internet, OPEN, **told)[:2] == (Reach.NOT, True)
