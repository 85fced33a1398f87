from __future__ import annotations

import itertools

from set_clock import Clock

from hivenb.engine.trust.conduct import (
    COMPANY_FOR,
    MOST_REMEMBERED,
    PAUSE_FOR_WAITING,
    STALLS_COUNT_FOR,
    Account,
    Conduct,
)

A, B = b"a", b"b"


def missed(epoch: int, *peers: bytes, seconds: float = 5.0) -> Account:
    return Account(epoch, missed=frozenset(peers), seconds=seconds)


def stalled(epoch: int, *peers: bytes, seconds: float = 5.0) -> Account:
    return Account(epoch, stalled=frozenset(peers), seconds=seconds)


def took_part(epoch: int, *peers: bytes) -> Account:
    return Account(epoch, took_part=frozenset(peers))


def names(conduct: Conduct, epoch: int) -> set[bytes]:
    return {one.peer for one in conduct.left_out(epoch)}


def test_nobody_waits_for_who_has_missed_two_rounds_in_a_row():
    conduct = Conduct(Clock())
    conduct.note("gradients", missed(1, A, B))
    assert not names(conduct, 2)
    conduct.note("gradients", Account(2, took_part=frozenset({B}), missed=frozenset({A}), seconds=5.0))
    (one,) = conduct.left_out(3)
    assert (one.peer, one.is_avoided) == (A, False)
    assert str(one) == "missed 2 rounds in a row; asked again in 2 epochs and 80 s"


def test_one_miss_now_and_then_is_nothing():
    conduct = Conduct(Clock())
    for epoch in range(0, 100, 2):
        conduct.note("gradients", missed(epoch, A))
        conduct.note("gradients", took_part(epoch + 1, A))
        assert not names(conduct, epoch + 2)


def test_a_round_of_each_sort_is_not_two_in_a_row():
    conduct = Conduct(Clock())
    conduct.note("gradients", missed(1, A))
    conduct.note("state", missed(1, A))
    assert not names(conduct, 2)
    conduct.note("gradients", missed(2, A))
    assert names(conduct, 3) == {A}
    conduct.note("state", took_part(3, A))
    assert names(conduct, 3) == {A}, "it comes to the rounds of one sort, and lets those of the other one wait"


def test_the_pause_grows_and_costs_a_small_part_of_the_time_for_ever():
    clock = Clock()
    conduct = Conduct(clock)
    pauses, waited, began = [], 0.0, clock.now
    epoch = 0
    for _ in range(12):
        while names(conduct, epoch):
            clock.now += 1.0  # epochs take a second
            epoch += 1
        conduct.note("gradients", missed(epoch, A))
        epoch, waited = epoch + 1, waited + 5.0
        clock.now += 5.0
        pauses.append(max((one.seconds for one in conduct.left_out(epoch)), default=0.0))
    assert pauses[0] == 0.0
    assert all(a < b for a, b in itertools.pairwise(pauses))
    assert waited <= (clock.now - began) / PAUSE_FOR_WAITING + 15.0


def test_it_is_asked_again_after_as_many_epochs_and_forgiven_when_it_comes():
    clock = Clock()
    conduct = Conduct(clock)
    for epoch in (1, 2):
        conduct.note("gradients", missed(epoch, A, seconds=0.0))
    assert [bool(names(conduct, epoch)) for epoch in (3, 4, 5)] == [True, True, False]
    conduct.note("gradients", missed(5, A, seconds=0.0))
    assert [bool(names(conduct, epoch)) for epoch in (6, 9, 10)] == [True, True, False]
    conduct.note("gradients", took_part(7, A))  # though nobody has waited for it
    assert not names(conduct, 8)
    conduct.note("gradients", missed(8, A, seconds=0.0))
    assert not names(conduct, 9), "it begins anew"


def test_who_stalls_is_not_let_in_either():
    conduct = Conduct(Clock())
    for epoch in (1, 2):
        conduct.note("state", stalled(epoch, A))
    (one,) = conduct.left_out(3)
    assert one.is_avoided
    assert "stalled 2 rounds in a row" in str(one)


def overstated(epoch: int, *peers: bytes) -> Account:
    return Account(epoch, took_part=frozenset({*peers, B}), overstated=frozenset(peers))


def test_nobody_waits_for_who_reports_samples_that_it_does_not_put_in():
    conduct = Conduct(Clock())
    conduct.note("gradients", overstated(1, A))
    conduct.note("state", took_part(2, A))
    assert not names(conduct, 2)
    conduct.note("gradients", overstated(2, A))
    (one,) = conduct.left_out(3)
    assert (one.peer, one.is_avoided) == (A, False), "what it puts in is welcome"
    assert str(one).startswith("put in less than half of the samples that it reported, 2 rounds in a row; asked again")
    conduct.note("gradients", took_part(4, A))
    assert not names(conduct, 5)


def test_who_has_averaged_with_others_of_late_has_company():
    clock = Clock()
    conduct = Conduct(clock)
    assert not conduct.has_company({A, B})
    conduct.note("gradients", took_part(1, A))
    assert conduct.has_company({A, B})
    assert not conduct.has_company({B})
    clock.now += COMPANY_FOR
    assert not conduct.has_company({A, B})


def test_rounds_of_both_sorts_count_together_for_who_stalls_them():
    conduct = Conduct(Clock())
    conduct.note("gradients", stalled(1, A))
    conduct.note("state", stalled(2, A))
    conduct.note("state", stalled(3, A))
    (one,) = conduct.left_out(3)
    assert one.is_avoided
    assert "stalled 2 rounds in a row" in str(one)


def test_who_dies_in_the_middle_of_an_update_has_stalled_once():
    """The groups of both rounds were found before; a peer whose parts are started anew is back for the next ones."""
    conduct = Conduct(Clock())
    conduct.note("gradients", stalled(15, A))
    conduct.note("state", stalled(16, A))
    assert not names(conduct, 16)
    conduct.note("gradients", took_part(17, A))
    conduct.note("state", took_part(18, A))
    conduct.note("gradients", stalled(30, A))
    conduct.note("state", stalled(31, A))
    assert not names(conduct, 31)


def test_who_misses_one_round_of_an_update_and_stalls_the_other_has_done_so_once():
    conduct = Conduct(Clock())
    conduct.note("gradients", missed(118, A))
    conduct.note("state", stalled(119, A))
    assert not names(conduct, 119)
    conduct.note("gradients", missed(119, A))
    (one,) = conduct.left_out(120)
    assert one.is_avoided


def test_who_stalls_the_rounds_of_each_epoch_is_left_out_after_the_second():
    conduct = Conduct(Clock())
    conduct.note("gradients", stalled(1, A))
    conduct.note("state", stalled(2, A))
    conduct.note("gradients", stalled(2, A))
    assert names(conduct, 2) == {A}


def test_who_takes_part_between_its_stalls_is_left_out_all_the_same():
    clock = Clock()
    conduct = Conduct(clock)
    waited, began, epoch = 0.0, clock.now, 0
    while clock.now < began + 3600.0:
        epoch += 1
        clock.now += 1.0
        if not names(conduct, epoch):
            waited += 5.0 * (epoch % 2)
            conduct.note("gradients", stalled(epoch, A) if epoch % 2 else took_part(epoch, A))
    assert waited < 3600.0 / PAUSE_FOR_WAITING + 60.0
    clock.now += STALLS_COUNT_FOR
    conduct.note("gradients", took_part(epoch + 1, A))
    conduct.note("gradients", stalled(epoch + 2, A))
    assert not names(conduct, epoch + 3), "it has behaved for long"


def test_who_has_stalled_a_round_is_not_let_in_either_when_it_misses_the_next():
    conduct = Conduct(Clock())
    conduct.note("gradients", stalled(1, A))
    conduct.note("gradients", missed(2, A))
    (one,) = conduct.left_out(3)
    assert one.is_avoided
    conduct.note("gradients", took_part(3, A))
    for epoch in (4, 5):
        conduct.note("gradients", missed(epoch, A))
    assert not conduct.left_out(6)[0].is_avoided


def test_who_stalls_a_round_and_then_takes_part_in_it_has_stalled_it():
    """One that leads a group which it does not begin, and comes to that of the others then, did so in each epoch."""
    conduct = Conduct(Clock())
    for epoch in (1, 2):
        conduct.note("gradients", stalled(epoch, A))
        conduct.note("gradients", took_part(epoch, A))
    assert names(conduct, 3) == {A}
    conduct.note("gradients", took_part(3, A))
    assert not names(conduct, 4)


def test_who_sends_rubbish_is_left_out_at_once():
    clock = Clock()
    conduct = Conduct(clock)
    conduct.note("gradients", Account(7, took_part=frozenset({B}), refused=((A, "its norm is of nan"),)))
    (one,) = conduct.left_out(8)
    assert one.is_avoided
    assert str(one) == "its norm is of nan; asked again in 2 epochs and 10 s"
    clock.now += 10.0
    assert not names(conduct, 10)


def test_going_back_to_an_earlier_epoch_makes_no_pause_longer():
    clock = Clock()
    conduct = Conduct(clock)
    for epoch in (1000, 1001):
        conduct.note("gradients", missed(epoch, A))
    assert names(conduct, 3) == {A}
    clock.now += 80.0
    assert not names(conduct, 3)


def test_what_is_remembered_is_bounded():
    conduct = Conduct(Clock())
    for number in range(3 * MOST_REMEMBERED):
        conduct.note("gradients", missed(1, number.to_bytes(4, "big")))
    assert len(conduct._records) == MOST_REMEMBERED
    conduct.note("gradients", took_part(2, *map(bytes, ([1], [2]))))
    assert len(conduct._records) == MOST_REMEMBERED
