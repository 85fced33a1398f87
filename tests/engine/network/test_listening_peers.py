"""Real daemons: where one that has dialled this one can be dialled itself."""

from __future__ import annotations

import asyncio
import time

import pytest
from hivemind.utils.multiaddr import Multiaddr
from tiny import LOOPBACK

from hivenb.engine.network.daemon import TiedP2P, _is_spelled

pytestmark = pytest.mark.process

PATIENCE = 30.0


def test_one_that_has_dialled_is_known_where_it_listens_and_not_where_it_dialled_from() -> None:
    async def check() -> None:
        called = await TiedP2P.create(**LOOPBACK)
        caller = await TiedP2P.create(initial_peers=[str(one) for one in await called.get_visible_maddrs()], **LOOPBACK)
        try:
            listens = [str(one).rpartition("/p2p/")[0] for one in await caller.get_visible_maddrs()]
            end = time.monotonic() + PATIENCE
            while True:
                dialled_from = {str(a) for one in await called.list_peers() for a in one.addrs}
                found = {one.peer_id: [str(a) for a in one.addrs] for one in await called.listening_peers()}
                if found.get(caller.peer_id) == listens:
                    break
                assert time.monotonic() < end, (found, listens)
                await asyncio.sleep(0.1)
            assert dialled_from.isdisjoint(listens)
            again = {one.peer_id: [str(a) for a in one.addrs] for one in await called.listening_peers()}
            assert again == found
        finally:
            await caller.shutdown()
            await called.shutdown()

    asyncio.run(check())


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("047f00000191020fa1", True),  # /ip4/127.0.0.1/udp/4001
        ("047f00000191020fa1cd03d103", False),  # /quic-v1/webtransport, by numbers that hivemind does not know
    ],
)
def test_an_address_that_hivemind_cannot_read_is_one_that_can_be_left_out(address: str, expected: bool) -> None:
    assert _is_spelled(Multiaddr(bytes.fromhex(address))) is expected
