"""Who is there of those who have reported, as told by real DHTs that live or were killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.p2p import PeerID
from tiny import LOOPBACK

from hivenb.engine.dht import DHT
from hivenb.engine.presence import Presence


def report(peer: DHT | PeerID, time: float = 1.0, client_mode: bool = False) -> LocalTrainingProgress:
    peer_id = peer if isinstance(peer, PeerID) else peer.peer_id
    return LocalTrainingProgress(
        peer_id=peer_id.to_bytes(),
        epoch=0,
        samples_accumulated=0,
        samples_per_second=1.0,
        time=time,
        client_mode=client_mode,
    )


@pytest.fixture
def mortal_dht(dht: DHT) -> Iterator[DHT]:
    opened = DHT(start=True, initial_peers=[str(a) for a in dht.get_visible_maddrs()], **LOOPBACK)
    yield opened
    if opened.is_alive():
        opened.shutdown()


def was_reached(presence: Presence, peer: DHT) -> bool:
    return presence._sightings[peer.peer_id.to_bytes()].was_reached


def test_whoever_was_killed_is_gone_until_it_reports_again(
    dht: DHT, joining_dht: DHT, mortal_dht: DHT, eventually: Callable[..., None]
) -> None:
    presence = Presence(dht)
    reports = [report(joining_dht), report(mortal_dht)]
    eventually(lambda: presence.find_gone(reports) or all(was_reached(presence, o) for o in (joining_dht, mortal_dht)))
    assert presence.find_gone(reports) == frozenset()
    mortal_dht.kill()
    mortal_dht.join()
    eventually(lambda: presence.find_gone(reports) == {mortal_dht.peer_id.to_bytes()})
    assert presence.find_gone([report(joining_dht), report(mortal_dht, time=2.0)]) == frozenset()
    assert presence.find_gone([report(joining_dht)]) == frozenset(), "not on the list any more"


def test_whoever_could_never_be_reached_may_be_there_for_others(dht: DHT, eventually: Callable[..., None]) -> None:
    presence = Presence(dht)
    stranger = report(PeerID(b"\x12\x20" + bytes(range(32))))
    presence.find_gone([stranger])
    first = presence._sightings[stranger.peer_id].answer
    assert first is not None
    eventually(first.done)
    for _ in range(3):
        assert presence.find_gone([stranger]) == frozenset()


def test_a_client_is_not_asked(dht: DHT, joining_dht: DHT) -> None:
    presence = Presence(dht)
    assert presence.find_gone([report(joining_dht, client_mode=True)]) == frozenset()
    assert not presence._sightings
