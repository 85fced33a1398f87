"""Who was struck off is looked for, a few at a time in turn, and those whom this peer has joined for ever."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest
from hivemind import DHT as _DHT
from hivemind.dht import DHTNode
from hivemind.p2p import P2PDaemonError, PeerID
from hivemind.utils.multiaddr import Multiaddr
from set_clock import Clock

from hivenb.engine.network import node as module
from hivenb.engine.network.dht import DHT
from hivenb.engine.network.node import (
    AT_A_TIME,
    MOST_GIVEN,
    MOST_REMEMBERED,
    REMEMBERED_FOR,
    KnownPeers,
    find_lost_peers,
)

ADDRESS = Multiaddr("/ip4/192.0.2.1/tcp/4001")


def peer(number: int) -> PeerID:
    return PeerID(b"\x12\x20" + bytes([number] * 32))


def joined(number: int) -> str:
    return f"{ADDRESS}/p2p/{peer(number)}"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module.time, "monotonic", made)
    return made


def test_who_is_there_is_not_looked_for(clock: Clock) -> None:
    known = KnownPeers([joined(1)])
    known.see(peer(2), [ADDRESS])
    assert known.lost([peer(1), peer(2)]) == []
    assert [(one, other.addresses) for one, other in known.lost([])] == [
        (peer(1), (ADDRESS,)),
        (peer(2), (ADDRESS,)),
    ]


def test_all_have_their_turn_and_who_was_seen_again_is_the_first(clock: Clock) -> None:
    known = KnownPeers()
    everybody = [peer(number) for number in range(2 * AT_A_TIME)]
    for one in everybody:
        known.see(one, [ADDRESS])
    tried = []
    for _ in range(2):
        clock.now += 1
        tried += [one for one, _ in known.lost([])]
    assert tried == everybody
    known.see(everybody[-1], [ADDRESS])
    assert known.lost([])[0][0] == everybody[-1]


def test_only_whom_it_has_joined_is_looked_for_always(clock: Clock) -> None:
    known = KnownPeers([joined(1)])
    known.see(peer(2), [ADDRESS])
    known.see(peer(1), [])
    clock.now += REMEMBERED_FOR + 1
    ((found, one),) = known.lost([])
    assert (found, one.addresses) == (peer(1), (ADDRESS,)), (
        "at the addresses that were given, as long as there are no others"
    )
    known.see(peer(1), [elsewhere := Multiaddr("/ip4/192.0.2.2/tcp/1")])
    ((_, one),) = known.lost([])
    assert one.addresses == (elsewhere, ADDRESS), "and after the others: a name may lead elsewhere by now"


def test_a_newer_address_is_tried_first_and_the_older_ones_stay(clock: Clock) -> None:
    known = KnownPeers([joined(1)])
    newer = "/ip4/192.0.2.2/tcp/1"
    known.join([f"{newer}/p2p/{peer(1)}", f"{newer}/p2p/{peer(3)}"])
    known.see(peer(2), [ADDRESS])
    found = dict(known.lost([peer(2)]))
    assert found[peer(1)].addresses == (Multiaddr(newer), ADDRESS)
    assert found[peer(3)].addresses == (Multiaddr(newer),)
    for number in range(MOST_GIVEN):
        known.join([f"/ip4/192.0.2.3/tcp/{number + 1}/p2p/{peer(1)}"])
    assert len(dict(known.lost([]))[peer(1)].given) == MOST_GIVEN


def test_so_many_are_remembered_and_tried_at_a_time(clock: Clock) -> None:
    known = KnownPeers([joined(0)])
    for number in range(1, 2 * MOST_REMEMBERED):
        known.see(peer(number), [ADDRESS])
    assert len(known) == MOST_REMEMBERED
    assert len(known.lost([])) == AT_A_TIME
    here = [peer(number) for number in range(1, 2 * MOST_REMEMBERED)]
    assert [one for one, _ in known.lost(here)] == [peer(0)], "whom it has joined gives place to nobody"


def test_a_daemon_that_does_not_answer_is_asked_again_and_any_other_error_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_EVERY", 0.0)
    raised = iter([P2PDaemonError("away"), EOFError(), TypeError("wrong"), TypeError("wrong"), TimeoutError()])

    async def listening_peers() -> None:
        if (error := next(raised, None)) is None:
            raise asyncio.CancelledError
        raise error

    node = SimpleNamespace(
        peer_id=peer(1),
        p2p=SimpleNamespace(listening_peers=listening_peers),
        protocol=SimpleNamespace(routing_table=SimpleNamespace(peer_id_to_uid={})),
    )
    with caplog.at_level(logging.WARNING, "hivenb"), pytest.raises(asyncio.CancelledError):
        asyncio.run(asyncio.wait_for(find_lost_peers(cast(DHTNode, node), KnownPeers()), 10))
    (record,) = caplog.records
    assert "wrong" in record.message, "once, and it is looked for them all the same"


async def _strike_off(other: PeerID, dht: _DHT, node: DHTNode) -> None:
    await node.p2p._client.disconnect(other)
    table = node.protocol.routing_table
    if (uid := table.peer_id_to_uid.get(other)) is not None:
        del table[uid]


async def _knows(other: PeerID, dht: _DHT, node: DHTNode) -> bool:
    return other in node.protocol.routing_table.peer_id_to_uid


@pytest.mark.process
def test_two_that_have_struck_each_other_off_find_each_other(
    dht: DHT, joining_dht: DHT, eventually: Callable[..., None]
) -> None:
    pairs = [(dht, joining_dht.peer_id), (joining_dht, dht.peer_id)]
    for own, other in pairs:
        eventually(lambda own=own, other=other: own.run_coroutine(partial(_knows, other)))
    for own, other in pairs:
        own.run_coroutine(partial(_strike_off, other))
    for own, other in pairs:
        eventually(lambda own=own, other=other: own.run_coroutine(partial(_knows, other)), 30)
