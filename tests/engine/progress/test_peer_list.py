"""The list of peers as it was read: of a real DHT that asks them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.utils import ValueWithExpiration, get_dht_time

from hivenb.engine.network.access.identity import id_of, new_identity
from hivenb.engine.network.dht import DHT
from hivenb.engine.progress.failure_detector import FLOOD, MAX_UNREACHED, Pace
from hivenb.engine.progress.tracker import GONE_AFTER, PeerList


def reported(peer_id: bytes, epoch: int = 0) -> ValueWithExpiration[Any]:
    report = {"epoch": epoch, "samples_accumulated": 1, "samples_per_second": 1.0, "client_mode": False}
    return ValueWithExpiration({**report, "peer_id": peer_id, "time": get_dht_time()}, math.inf)


def record(**entries: ValueWithExpiration[Any]) -> ValueWithExpiration[Any]:
    return ValueWithExpiration({key.encode(): entry for key, entry in entries.items()}, math.inf)


def test_of_several_that_name_one_peer_the_first_counts(dht: DHT, joining_dht: DHT) -> None:
    peers, peer = PeerList(dht), joining_dht.peer_id.to_bytes()
    assert set(peers.take_in(record(true=reported(peer)), b"own", GONE_AFTER)) == {b"true"}
    both = record(forged=reported(peer, 7), true=reported(peer, 3))
    assert {key: one.epoch for key, one in peers.take_in(both, b"own", GONE_AFTER).items()} == {b"true": 3}
    assert peers.look is not None
    assert [info.epoch for info in peers.look.peers] == [3]
    peers.take_in(record(), b"own", GONE_AFTER)
    assert set(peers.take_in(both, b"own", GONE_AFTER)) == {b"forged"}, "nobody else was there meanwhile"


def test_rounds_wait_for_nobody_who_does_not_answer_and_a_flood_is_not_counted(
    dht: DHT, joining_dht: DHT, eventually: Any
) -> None:
    peers, seen = PeerList(dht), []
    peers.on_look = lambda reports, gone: seen.append(reports) or frozenset()
    flood = {f"bogus{number}": id_of(new_identity()) for number in range(3 * MAX_UNREACHED)}
    true = joining_dht.peer_id.to_bytes()

    def look() -> list[LocalTrainingProgress]:
        entries = {key: reported(peer) for key, peer in {"true": true, **flood}.items()}
        counted = peers.take_in(record(**entries), b"own", GONE_AFTER)
        assert len(counted) <= MAX_UNREACHED + 1
        assert b"true" in counted
        return seen[-1]

    eventually(lambda: [report.peer_id for report in look()] == [true])
    look()
    assert peers.pace.peers == 1 + FLOOD + 1, "they are not to slow it down"


def test_the_more_are_on_the_list_the_more_seldom_each_reports(dht: DHT, joining_dht: DHT) -> None:
    peers, own, other = PeerList(dht), dht.peer_id.to_bytes(), joining_dht.peer_id.to_bytes()
    assert peers.pace == Pace(1)
    peers.take_in(record(own=reported(own), other=reported(other)), b"own", GONE_AFTER)
    assert peers.pace == Pace(2)
    peers.take_in(record(), b"own", GONE_AFTER)
    assert peers.pace == Pace(1)


def test_silence_is_what_is_heard_while_somebody_listens(dht: DHT, monkeypatch: pytest.MonkeyPatch) -> None:
    peers, told = PeerList(dht), []
    monkeypatch.setattr(peers._detector, "find_gone", lambda *args: told.append(args) or frozenset())
    peers.look_for_the_gone(GONE_AFTER, reading_since=0.0)
    assert told == [], "nobody is known yet"
    peers.take_in(record(), b"own", GONE_AFTER)
    assert peers.look is not None
    for seconds in (3.0, -3.0):  # until the next look began; it was under way already
        peers.look_for_the_gone(GONE_AFTER, reading_since=peers.look.taken_at + seconds)
    assert [unread for *_, unread in told[1:]] == [pytest.approx(3.0), 0.0]


def test_what_is_no_list_holds_nobody(dht: DHT) -> None:
    peers = PeerList(dht)
    for rubbish in (None, 7, "x", ValueWithExpiration(b"plain", 1.0), ValueWithExpiration({"a": 1}, 1.0)):
        assert peers.take_in(rubbish, b"own", GONE_AFTER) == {}


def test_what_does_not_count_is_seen_and_not_counted(dht: DHT, joining_dht: DHT) -> None:
    peers, peer = PeerList(dht), joining_dht.peer_id
    peers.on_look = lambda reports, gone: frozenset(one.peer_id for one in reports)
    assert peers.take_in(record(true=reported(peer.to_bytes())), b"own", GONE_AFTER) == {}
    assert peers.look is not None
    assert [info.peer_id for info in peers.look.peers] == [peer.to_base58()]
    assert peers.look.uncounted == {peer.to_base58()}
