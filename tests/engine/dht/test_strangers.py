"""Who is no member is hung up on by a private relay, and loses its place there; members stay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import hivemind
import pytest
from hivemind.dht import DHTNode
from hivemind.p2p import P2P, PeerID
from tiny import LOOPBACK

from hivenb.engine.dht import strangers
from hivenb.engine.dht.dht import DHT
from hivenb.engine.dht.secret import Secret

pytestmark = pytest.mark.process

SECRET = Secret.random()


async def connected(dht: hivemind.DHT, node: DHTNode) -> set[str]:
    return {str(PeerID(peer.peer_id.to_bytes())) for peer in await node.p2p.list_peers()}


def test_a_private_relay_hangs_up_on_strangers(
    monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]
) -> None:
    monkeypatch.setattr(strangers, "LOOK_EVERY", 0.5)
    relay: Any = DHT(start=True, secret=SECRET, relay_service=True, **LOOPBACK)
    addresses = [str(address) for address in relay.get_visible_maddrs()]
    member: Any = DHT(start=True, secret=SECRET, initial_peers=addresses, **LOOPBACK)

    async def come_and_wait() -> None:
        p2p = await P2P.create(initial_peers=addresses, **LOOPBACK)
        try:
            assert relay.peer_id in {peer.peer_id for peer in await p2p.list_peers()}
            for _ in range(200):
                if relay.peer_id not in {peer.peer_id for peer in await p2p.list_peers()}:
                    return
                await asyncio.sleep(0.1)
            pytest.fail("a stranger is connected for 20 s")
        finally:
            await p2p.shutdown()

    try:
        asyncio.run(come_and_wait())
        assert str(member.peer_id) in relay.run_coroutine(connected)
    finally:
        member.shutdown()
        relay.shutdown()
