"""Real daemons, asked for real places: how much a relay passes on."""

from __future__ import annotations

import asyncio
from typing import Any

import psutil
import pytest
from hivemind.p2p import P2PDaemonError
from tiny import LOOPBACK

from hivenb.engine.network import relays
from hivenb.engine.network.daemon import NonRelayingP2P, RelayingP2P
from hivenb.engine.network.dht import DHT
from hivenb.engine.network.relays import RELAYED_BYTES, start_relay

pytestmark = pytest.mark.process

FORCED = {**LOOPBACK, "force_reachability": "public"}


async def limit_of(p2p: Any) -> int | None:
    addresses = relays._on_this_machine(map(str, await p2p.get_visible_maddrs()))
    return await relays._limit_of(p2p.peer_id, addresses)


def test_a_relay_passes_on_what_a_training_sends_however_its_daemon_came_up() -> None:
    async def check() -> None:
        starts = []

        async def start() -> tuple[Any, Any]:
            starts.append(await RelayingP2P.create(**FORCED))
            return starts[-1], None

        for _ in range(2):
            p2p, _ = await start_relay(start, [])
            assert await limit_of(p2p) == RELAYED_BYTES
            await p2p.shutdown()
        assert all(one._child.returncode is not None for one in starts)

    asyncio.run(check())


def test_a_daemon_that_never_does_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "_MOST_STARTS", 2)

    async def start() -> tuple[Any, Any]:
        return await NonRelayingP2P.create(**LOOPBACK), None  # which passes on a little all the same

    with pytest.raises(P2PDaemonError, match=r"relays 131072 bytes and no more"):
        asyncio.run(start_relay(start, []))


def test_the_daemon_of_a_relay_runs_on_one_processor_where_it_comes_up_right_most_often() -> None:
    dht = DHT(start=True, relay_service=True, **LOOPBACK)
    try:
        (daemon,) = psutil.Process(dht.pid).children()
        assert daemon.environ()["GOMAXPROCS"] == "1"
    finally:
        dht.shutdown()
