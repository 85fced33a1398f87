from __future__ import annotations

import multiprocessing as mp
import time
from functools import partial

import pytest
from hivemind.p2p import PeerID
from tiny import LOOPBACK

from hivenb.engine.network.daemon import MOST_BLOCKED, BlockedPeers, greet
from hivenb.engine.network.dht import DHT, reachable_addresses

A, B = PeerID(b"a" * 34), PeerID(b"b" * 42)


def test_who_is_blocked_until_no_longer():
    blocked = BlockedPeers()
    assert A not in blocked
    blocked.replace(frozenset({A.to_bytes(), B.to_bytes()}))
    assert A in blocked
    assert B in blocked
    assert blocked.all == {A.to_bytes(), B.to_bytes()}
    blocked.replace(frozenset({B.to_bytes()}))
    assert A not in blocked
    assert B in blocked
    blocked.replace(frozenset())
    assert B not in blocked
    assert not blocked.all


def test_how_many_can_be_is_bounded():
    blocked = BlockedPeers()
    many = frozenset(number.to_bytes(34, "big") for number in range(MOST_BLOCKED))
    blocked.replace(many)
    assert blocked.all == many
    with pytest.raises(ValueError, match="no more than 256"):
        blocked.replace(many | {B.to_bytes()})


@pytest.mark.process
def test_a_process_that_is_forked_before_sees_it():
    blocked = BlockedPeers()
    asked, answers = mp.Pipe()

    def look() -> None:
        answers.recv()
        answers.send(A in blocked)

    child = mp.get_context("fork").Process(target=look)
    child.start()
    blocked.replace(frozenset({A.to_bytes()}))
    asked.send(None)
    assert asked.recv() is True
    child.join(20)


@pytest.mark.process
def test_a_blocked_peer_is_answered_nothing_until_it_no_longer_is():
    ours = DHT(start=True, **LOOPBACK)
    theirs = DHT(start=True, initial_peers=list(reachable_addresses(ours)), **LOOPBACK)
    try:
        expiry = time.time() + 60
        assert theirs.store("before", 1, expiry)
        assert ours.get("before", latest=True).value == 1
        ours.blocked_peers.replace(frozenset({theirs.peer_id.to_bytes()}))
        theirs.store("meanwhile", 2, expiry)
        assert ours.get("meanwhile", latest=True) is None
        ours.blocked_peers.replace(frozenset())
        ours.run_coroutine(partial(greet, theirs.peer_id))
        assert theirs.store("after", 3, expiry)
        assert ours.get("after", latest=True).value == 3
    finally:
        theirs.shutdown()
        ours.shutdown()
