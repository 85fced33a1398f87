from __future__ import annotations

import itertools

from set_clock import Clock

from hivenb.engine.trust.reliability import (
    AVERAGED_WITHIN,
    MOST_REMEMBERED,
    PAUSE_FOR_WAITING,
    STALLS_COUNT_FOR,
    PeerReliability,
    RoundReport,
)

A, B = b"a", b"b"


def missed(epoch: int, *peers: bytes, seconds: float = 5.0) -> RoundReport:
    return RoundReport(epoch, missed=frozenset(peers), seconds=seconds)


def stalled(epoch: int, *peers: bytes, seconds: float = 5.0) -> RoundReport:
    return RoundReport(epoch, stalled=frozenset(peers), seconds=seconds)


def took_part(epoch: int, *peers: bytes) -> RoundReport:
    return RoundReport(epoch, took_part=frozenset(peers))


def names(reliability: PeerReliability, epoch: int) -> set[bytes]:
    return {one.peer for one in reliability.excluded_peers(epoch)}


def test_nobody_waits_for_who_has_missed_two_rounds_in_a_row():
    reliability = PeerReliability(Clock())
    reliability.note("gradients", missed(1, A, B))
    assert not names(reliability, 2)
    reliability.note("gradients", RoundReport(2, took_part=frozenset({B}), missed=frozenset({A}), seconds=5.0))
    (one,) = reliability.excluded_peers(3)
    assert (one.peer, one.is_avoided) == (A, False)
    assert str(one) == "missed 2 rounds in a row; asked again in 2 epochs and 80 s"


def test_one_miss_now_and_then_is_nothing():
    reliability = PeerReliability(Clock())
    for epoch in range(0, 100, 2):
        reliability.note("gradients", missed(epoch, A))
        reliability.note("gradients", took_part(epoch + 1, A))
        assert not names(reliability, epoch + 2)


def test_a_round_of_each_sort_is_not_two_in_a_row():
    reliability = PeerReliability(Clock())
    reliability.note("gradients", missed(1, A))
    reliability.note("state", missed(1, A))
    assert not names(reliability, 2)
    reliability.note("gradients", missed(2, A))
    assert names(reliability, 3) == {A}
    reliability.note("state", took_part(3, A))
    assert names(reliability, 3) == {A}, "it comes to the rounds of one sort, and lets those of the other one wait"


def test_the_pause_grows_and_costs_a_small_part_of_the_time_for_ever():
    clock = Clock()
    reliability = PeerReliability(clock)
    pauses, waited, began = [], 0.0, clock.now
    epoch = 0
    for _ in range(12):
        while names(reliability, epoch):
            clock.now += 1.0  # epochs take a second
            epoch += 1
        reliability.note("gradients", missed(epoch, A))
        epoch, waited = epoch + 1, waited + 5.0
        clock.now += 5.0
        pauses.append(max((one.seconds for one in reliability.excluded_peers(epoch)), default=0.0))
    assert pauses[0] == 0.0
    assert all(a < b for a, b in itertools.pairwise(pauses))
    assert waited <= (clock.now - began) / PAUSE_FOR_WAITING + 15.0


def test_it_is_asked_again_after_as_many_epochs_and_forgiven_when_it_comes():
    clock = Clock()
    reliability = PeerReliability(clock)
    for epoch in (1, 2):
        reliability.note("gradients", missed(epoch, A, seconds=0.0))
    assert [bool(names(reliability, epoch)) for epoch in (3, 4, 5)] == [True, True, False]
    reliability.note("gradients", missed(5, A, seconds=0.0))
    assert [bool(names(reliability, epoch)) for epoch in (6, 9, 10)] == [True, True, False]
    reliability.note("gradients", took_part(7, A))  # though nobody has waited for it
    assert not names(reliability, 8)
    reliability.note("gradients", missed(8, A, seconds=0.0))
    assert not names(reliability, 9), "it begins anew"


def test_who_stalls_is_not_let_in_either():
    reliability = PeerReliability(Clock())
    for epoch in (1, 2):
        reliability.note("state", stalled(epoch, A))
    (one,) = reliability.excluded_peers(3)
    assert one.is_avoided
    assert "stalled 2 rounds in a row" in str(one)


def overstated(epoch: int, *peers: bytes) -> RoundReport:
    return RoundReport(epoch, took_part=frozenset({*peers, B}), overstated=frozenset(peers))


def test_nobody_waits_for_who_reports_samples_that_it_does_not_put_in():
    reliability = PeerReliability(Clock())
    reliability.note("gradients", overstated(1, A))
    reliability.note("state", took_part(2, A))
    assert not names(reliability, 2)
    reliability.note("gradients", overstated(2, A))
    (one,) = reliability.excluded_peers(3)
    assert (one.peer, one.is_avoided) == (A, False), "what it puts in is welcome"
    assert str(one).startswith("put in less than half of the samples that it reported, 2 rounds in a row; asked again")
    reliability.note("gradients", took_part(4, A))
    assert not names(reliability, 5)


def test_who_has_averaged_with_others_of_late_has_company():
    clock = Clock()
    reliability = PeerReliability(clock)
    assert not reliability.has_averaged_with({A, B})
    reliability.note("gradients", took_part(1, A))
    assert reliability.has_averaged_with({A, B})
    assert not reliability.has_averaged_with({B})
    clock.now += AVERAGED_WITHIN
    assert not reliability.has_averaged_with({A, B})


def test_rounds_of_both_sorts_count_together_for_who_stalls_them():
    reliability = PeerReliability(Clock())
    reliability.note("gradients", stalled(1, A))
    reliability.note("state", stalled(2, A))
    reliability.note("state", stalled(3, A))
    (one,) = reliability.excluded_peers(3)
    assert one.is_avoided
    assert "stalled 2 rounds in a row" in str(one)


def test_who_dies_in_the_middle_of_an_update_has_stalled_once():
    """The groups of both rounds were found before; a peer whose parts are started anew is back for the next ones."""
    reliability = PeerReliability(Clock())
    reliability.note("gradients", stalled(15, A))
    reliability.note("state", stalled(16, A))
    assert not names(reliability, 16)
    reliability.note("gradients", took_part(17, A))
    reliability.note("state", took_part(18, A))
    reliability.note("gradients", stalled(30, A))
    reliability.note("state", stalled(31, A))
    assert not names(reliability, 31)


def test_who_misses_one_round_of_an_update_and_stalls_the_other_has_done_so_once():
    reliability = PeerReliability(Clock())
    reliability.note("gradients", missed(118, A))
    reliability.note("state", stalled(119, A))
    assert not names(reliability, 119)
    reliability.note("gradients", missed(119, A))
    (one,) = reliability.excluded_peers(120)
    assert one.is_avoided


def test_who_stalls_the_rounds_of_each_epoch_is_excluded_after_the_second():
    reliability = PeerReliability(Clock())
    reliability.note("gradients", stalled(1, A))
    reliability.note("state", stalled(2, A))
    reliability.note("gradients", stalled(2, A))
    assert names(reliability, 2) == {A}


def test_who_takes_part_between_its_stalls_is_excluded_all_the_same():
    clock = Clock()
    reliability = PeerReliability(clock)
    waited, began, epoch = 0.0, clock.now, 0
    while clock.now < began + 3600.0:
        epoch += 1
        clock.now += 1.0
        if not names(reliability, epoch):
            waited += 5.0 * (epoch % 2)
            reliability.note("gradients", stalled(epoch, A) if epoch % 2 else took_part(epoch, A))
    assert waited < 3600.0 / PAUSE_FOR_WAITING + 60.0
    clock.now += STALLS_COUNT_FOR
    reliability.note("gradients", took_part(epoch + 1, A))
    reliability.note("gradients", stalled(epoch + 2, A))
    assert not names(reliability, epoch + 3), "it has behaved for long"


def test_who_has_stalled_a_round_is_not_let_in_either_when_it_misses_the_next():
    reliability = PeerReliability(Clock())
    reliability.note("gradients", stalled(1, A))
    reliability.note("gradients", missed(2, A))
    (one,) = reliability.excluded_peers(3)
    assert one.is_avoided
    reliability.note("gradients", took_part(3, A))
    for epoch in (4, 5):
        reliability.note("gradients", missed(epoch, A))
    assert not reliability.excluded_peers(6)[0].is_avoided


def test_who_stalls_a_round_and_then_takes_part_in_it_has_stalled_it():
    """One that leads a group which it does not begin, and comes to that of the others then, did so in each epoch."""
    reliability = PeerReliability(Clock())
    for epoch in (1, 2):
        reliability.note("gradients", stalled(epoch, A))
        reliability.note("gradients", took_part(epoch, A))
    assert names(reliability, 3) == {A}
    reliability.note("gradients", took_part(3, A))
    assert not names(reliability, 4)


def test_who_sends_rubbish_is_excluded_at_once():
    clock = Clock()
    reliability = PeerReliability(clock)
    reliability.note("gradients", RoundReport(7, took_part=frozenset({B}), refused=((A, "its norm is of nan"),)))
    (one,) = reliability.excluded_peers(8)
    assert one.is_avoided
    assert str(one) == "its norm is of nan; asked again in 2 epochs and 10 s"
    clock.now += 10.0
    assert not names(reliability, 10)


def test_going_back_to_an_earlier_epoch_makes_no_pause_longer():
    clock = Clock()
    reliability = PeerReliability(clock)
    for epoch in (1000, 1001):
        reliability.note("gradients", missed(epoch, A))
    assert names(reliability, 3) == {A}
    clock.now += 80.0
    assert not names(reliability, 3)


def test_what_is_remembered_is_bounded():
    reliability = PeerReliability(Clock())
    for number in range(3 * MOST_REMEMBERED):
        reliability.note("gradients", missed(1, number.to_bytes(4, "big")))
    assert len(reliability._records) == MOST_REMEMBERED
    reliability.note("gradients", took_part(2, *map(bytes, ([1], [2]))))
    assert len(reliability._records) == MOST_REMEMBERED
