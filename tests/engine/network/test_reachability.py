"""In which way others reach a peer, by what those say whom it asks; real daemons are in ``test_relaying.py``."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.p2p import PeerID

from hivenb.engine.network import reachability
from hivenb.engine.network.addresses import Reach
from hivenb.engine.network.reachability import _IS_NOT_REACHED, _RELAYS, Way, start_reachable

RELAY, GUEST = (PeerID(b"\x12\x20" + bytes([number] * 32)) for number in (1, 2))

AT_RELAY = f"/ip4/192.0.2.1/tcp/4001/p2p/{RELAY}"


class Asked:
    """What a peer that starts asks, and is told in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *told: int | None):
        self.started: list[Way] = []
        self.ports: list[int] = []
        self._told = iter(told)
        monkeypatch.setattr(reachability, "ask", self.ask)
        monkeypatch.setattr(reachability, "_is_given_a_place", self.is_given_a_place)

    def way(self, initial_peer: str, is_walled: bool) -> Way:
        return asyncio.run(start_reachable(self.start, [initial_peer], is_walled))[2]

    async def start(self, way: Way) -> tuple[Any, None]:
        self.started.append(way)
        return self, None

    async def ask(self, p2p: Any, peer: PeerID, port: int) -> int | None:
        assert peer == RELAY
        self.ports.append(port)
        return next(self._told)

    async def is_given_a_place(self, p2p: Any) -> bool:
        return True

    async def get_visible_maddrs(self, latest: bool) -> list[str]:
        return ["/ip4/192.0.2.7/tcp/4007"]

    async def list_peers(self) -> list[Any]:
        return [SimpleNamespace(peer_id=RELAY, addrs=["/ip4/192.0.2.1/tcp/4001"])]

    async def shutdown(self) -> None:
        pass


def test_the_relay_of_a_peer_that_is_relayed_itself_is_asked_for_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon takes the last id of an address for the relay's, which here is the guest's."""
    asked = Asked(monkeypatch, _RELAYS | _IS_NOT_REACHED, _RELAYS | _IS_NOT_REACHED)
    way = asked.way(f"{AT_RELAY}/p2p-circuit/p2p/{GUEST}", is_walled=False)
    assert way == Way(Reach.RELAYED, (AT_RELAY,))
    assert asked.started == [Way(), way]
    assert asked.ports == [4007, 4007]


def test_a_relay_that_does_not_answer_is_asked_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook in a cloud would be a client for the whole session."""
    asked = Asked(monkeypatch, None, _RELAYS)
    assert asked.way(AT_RELAY, is_walled=True) == Way(Reach.RELAYED, (AT_RELAY,))
    assert asked.ports == [0, 0], "and is not to try what cannot succeed"


def test_who_answers_that_it_relays_nothing_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Asked(monkeypatch, 0).way(AT_RELAY, is_walled=True) == Way(Reach.NOT)
    assert Asked(monkeypatch, None, None).way(AT_RELAY, is_walled=True) == Way(Reach.NOT)
