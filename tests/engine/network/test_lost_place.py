"""A peer whose relay has no place for it begins anew, more and more seldom; real relays are in ``test_relaying.py``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hivemind.p2p import P2P, PeerID

from hivenb.engine.network import relays
from hivenb.engine.network.relays import LostPlaces, keep_place
from hivenb.engine.process.restart_count import MOST_RESTARTS, RESTARTS_WITHIN

RELAY = PeerID(b"\x12\x20" + bytes([1] * 32))


def seconds_until_it_begins_anew(
    monkeypatch: pytest.MonkeyPatch, lost: LostPlaces, has_one: Iterable[bool] = ()
) -> float:
    """How long it takes from one start of the daemon to its end.

    :param has_one: whether it has a place at each look; none after that
    """
    slept: list[float] = []
    placed = iter(has_one)

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def list_peers() -> list[Any]:
        return [SimpleNamespace(peer_id=RELAY)]

    async def get_visible_maddrs(latest: bool) -> list[str]:
        return ["/ip4/192.0.2.1/tcp/4001/p2p-circuit"] if next(placed, False) else ["/ip4/192.0.2.7/tcp/4007"]

    monkeypatch.setattr(relays.asyncio, "sleep", sleep)
    ended: list[bool] = []
    child = SimpleNamespace(terminate=lambda: ended.append(True))
    p2p = SimpleNamespace(list_peers=list_peers, get_visible_maddrs=get_visible_maddrs, _child=child)
    asyncio.run(keep_place(cast(P2P, p2p), [f"/ip4/192.0.2.1/tcp/4001/p2p/{RELAY}"], lost))
    assert ended == [True]
    return sum(slept)


def test_a_relay_that_is_full_for_an_hour_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many restarts within a minute are one too many."""
    lost = LostPlaces()
    waits = [seconds_until_it_begins_anew(monkeypatch, lost) for _ in range(6)]
    assert waits == [15.0, 60.0, 240.0, 960.0, 1800.0, 1800.0]
    assert sum(waits[: MOST_RESTARTS - 1]) > RESTARTS_WITHIN
    assert seconds_until_it_begins_anew(monkeypatch, lost, [False, True, True]) == 30.0, "it had one in between"
    assert lost.in_a_row == 1
