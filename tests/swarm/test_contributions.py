"""What each peer has put in: every epoch counts once, for what it holds, shared as the peers reported."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hivenb.engine.progress.peer_reports import PeerInfo
from hivenb.swarm.contributions import SLACK, Contributions

OWN = PeerInfo("own", 0, 0, 100.0, False, 0.1, True)
OTHER = PeerInfo("other", 0, 0, 300.0, False, 0.1, False)


def look(known: Contributions, epoch: int, own: int, other: int, seconds: float = 1.0) -> None:
    known.note((replace(OWN, epoch=epoch, samples=own), replace(OTHER, epoch=epoch, samples=other)), 1000, seconds)


def test_an_epoch_counts_for_the_target_batch_size_and_is_shared_as_reported():
    known = Contributions()
    assert (known.total, known.share("own")) == (0.0, 0.0)
    look(known, 0, 50, 150)
    assert (known.samples("own"), known.samples("other"), known.share("own")) == (50, 150, 0.25)
    look(known, 0, 100, 300)
    look(known, 1, 0, 0)
    assert (known.samples("own"), known.samples("other"), known.total) == (250, 750, 1000)
    look(known, 1, 500, 250)
    assert (known.samples("own"), known.samples("other")) == (750, 1000)


def test_epochs_that_passed_between_two_looks_are_shared_as_the_last_one_was():
    known = Contributions()
    look(known, 4, 300, 100)
    look(known, 7, 0, 0, seconds=5.0)
    assert (known.samples("own"), known.samples("other")) == (2250, 750)
    look(known, 8, 10, 0)
    assert known.samples("own") == 2510, "nothing was reported in epoch 7: shared by speed"
    assert known.share("other") == pytest.approx(1500 / 4010)


def test_epochs_that_no_speed_explains_were_jumped_over_and_are_nobodys():
    known = Contributions()
    look(known, 0, 100, 100)
    look(known, 50, 0, 0)
    assert known.total == 0
    look(known, 51, 0, 0)
    assert known.total == 1000
    look(known, 51 + 10, 0, 0, seconds=10.0)
    assert known.total == 11_000
    look(known, 61 + SLACK, 0, 0, seconds=0.0)
    assert known.total == 1000 * (11 + SLACK)


def test_a_peer_that_claims_more_than_an_epoch_holds_gets_no_more_than_that():
    known = Contributions()
    look(known, 0, 1000, 10**15)
    look(known, 1, 0, 10**15)
    assert (known.samples("own"), known.samples("other")) == (500, 1500)
    known.note((replace(OWN, epoch=1), replace(OTHER, epoch=10**9, samples=9)), 1000, 1.0)
    look(known, 2, 0, 0)
    assert known.total == 2000, "what epoch it is, this peer's own report says"


def test_without_an_own_report_the_epoch_is_that_of_most():
    known = Contributions()
    others = [replace(OTHER, peer_id=str(number), epoch=3, samples=10) for number in range(3)]
    known.note([*others, replace(OTHER, peer_id="liar", epoch=10**9, samples=10)], 1000, 1.0)
    assert known.peer_ids == {"0", "1", "2"}
    known.note([], 1000, 1.0)
    assert known.total == 30


def test_memory_is_bounded_and_nothing_is_lost_from_the_whole():
    known = Contributions(capacity=5)
    for epoch in range(50):
        known.note((replace(OWN, epoch=epoch, samples=999), replace(OTHER, peer_id=str(epoch), samples=1)), 1000, 1.0)
        known.note((replace(OWN, epoch=epoch), replace(OTHER, peer_id=str(epoch), epoch=epoch, samples=1)), 1000, 1.0)
    known.note((replace(OWN, epoch=50),), 1000, 1.0)
    assert len(known.peer_ids) == 5
    assert known.total == pytest.approx(50 * 1000)
    assert known.samples("own") == pytest.approx(50 * 999)
