"""Real daemons: where one that has dialled this one can be dialled itself."""

from __future__ import annotations

import asyncio
import time

import pytest
from tiny import LOOPBACK

from hivenb.engine.network.daemon import TiedP2P

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
