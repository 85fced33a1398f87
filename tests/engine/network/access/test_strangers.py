"""Who is no member is hung up on in a private swarm, at once when it comes back; members stay, clients too."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import hivemind
import pytest
from hivemind.dht import DHTNode
from hivemind.p2p import P2P, PeerID
from hivemind.utils.multiaddr import Multiaddr
from tiny import LOOPBACK

from hivenb.engine.network.access import strangers
from hivenb.engine.network.access.tokens import Secret
from hivenb.engine.network.dht import DHT
from hivenb.engine.network.relays import _ask_for_place

pytestmark = pytest.mark.process

SECRET = Secret.random()


@pytest.fixture
def looking_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "LOOK_EVERY", 0.5)


@pytest.fixture
def member(looking_often: None) -> Iterator[Any]:
    """Opens members of a private swarm."""
    with ExitStack() as stack:

        def start(**kwargs: Any) -> DHT:
            dht = DHT(start=True, secret=SECRET, **LOOPBACK, **kwargs)
            stack.callback(dht.shutdown)
            return dht

        yield start


async def connected(dht: hivemind.DHT, node: DHTNode) -> set[str]:
    return {str(PeerID(peer.peer_id.to_bytes())) for peer in await node.p2p.list_peers()}


async def seconds_until_hung_up_on(stranger: P2P, host: PeerID) -> float:
    began = time.monotonic()
    while host in {peer.peer_id for peer in await stranger.list_peers()}:
        assert time.monotonic() - began < 30, "a stranger is connected for 30 s"
        await asyncio.sleep(0.05)
    return time.monotonic() - began


@pytest.mark.parametrize("relay_service", [True, None], ids=["relay", "no relay"])
def test_strangers_are_hung_up_on_again_and_again_and_members_never(member: Any, relay_service: bool | None) -> None:
    host = member(relay_service=relay_service)
    addresses = [str(address) for address in host.get_visible_maddrs()]
    others = [member(initial_peers=addresses), member(initial_peers=addresses, client_mode=True)]

    async def come_twice() -> None:
        stranger = await P2P.create(initial_peers=addresses, **LOOPBACK)
        try:
            await _ask_for_place(stranger, host.peer_id)  # which libp2p gives to everybody, and has no option not to
            await seconds_until_hung_up_on(stranger, host.peer_id)
            await stranger._client.connect(host.peer_id, [Multiaddr(addresses[0].rpartition("/p2p/")[0])])
            again = await seconds_until_hung_up_on(stranger, host.peer_id)
            assert again < 10, "it is remembered, and given no further looks"
        finally:
            await stranger.shutdown()

    asyncio.run(come_twice())
    assert {str(other.peer_id) for other in others} <= host.run_coroutine(connected)


def test_who_comes_back_is_remembered_for_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(strangers.time, "monotonic", lambda: now)
    strikes, peer, other = strangers.Strikes(), PeerID(b"a"), PeerID(b"b")
    assert [strikes.add(peer), strikes.add(peer), strikes.add(other)] == [1, 2, 1]
    now += 3500
    assert strikes.add(peer) == 3
    now += 3500
    assert [strikes.add(peer), strikes.add(other)] == [4, 1]
    strikes.forget(peer)
    assert strikes.add(peer) == 1
    for number in range(strangers._MOST_REMEMBERED):
        strikes.add(PeerID(b"%d" % number))
    assert strikes.add(peer) == 1, "who makes up ids takes no more memory than so many"
