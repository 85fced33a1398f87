"""In which way others reach a peer, by what those say whom it asks; real daemons are in ``test_relaying.py``."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.p2p import PeerID

from hivenb.engine.network import reachability
from hivenb.engine.network.addresses import Reach
from hivenb.engine.network.reachability import Way, start_reachable

RELAY, GUEST = (PeerID(b"\x12\x20" + bytes([number] * 32)) for number in (1, 2))


def test_the_relay_of_a_peer_that_is_relayed_itself_is_asked_for_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon takes the last id of an address for the relay's, which here is the guest's."""
    started: list[Way] = []

    async def start(way: Way) -> tuple[Any, None]:
        async def shutdown() -> None:
            pass

        started.append(way)
        return SimpleNamespace(shutdown=shutdown), None

    async def ask_all(p2p: Any, initial_peers: Any) -> dict[PeerID, int]:
        return {RELAY: reachability._RELAYS | reachability._IS_NOT_REACHED}

    async def is_given_a_place(p2p: Any) -> bool:
        return True

    monkeypatch.setattr(reachability, "_ask_all", ask_all)
    monkeypatch.setattr(reachability, "_is_given_a_place", is_given_a_place)
    through = f"/ip4/192.0.2.1/tcp/4001/p2p/{RELAY}"
    _, _, way = asyncio.run(start_reachable(start, [f"{through}/p2p-circuit/p2p/{GUEST}"], is_walled=False))
    assert way == Way(Reach.RELAYED, (through,))
    assert started == [Way(), way]
