"""How many local peers come back to a run, and to one that takes its place."""

from __future__ import annotations

from typing import Any

import pytest

from hivenb.peers.peers_of_next_start import ComingBack


class Peer:
    """Looks like a local peer."""

    state = "training"


class Run:
    """Looks like a run."""

    def __init__(self) -> None:
        self.followers: list[Peer] = []


def arrive(coming: ComingBack, run: Any) -> list[Any]:
    """All that are to come."""
    came = []
    while coming.take_one():
        came.append(Peer())
        run.followers.append(came[-1])
        coming.note_arrival((came[-1],), run)  # type: ignore[arg-type]
    return came


def test_as_many_come_back_as_have_left() -> None:
    coming, run = ComingBack(), Run()
    coming.note(run, 2, restart=True)  # type: ignore[arg-type]
    assert not coming.take_one(), "before it trains"
    assert coming.begin(run) == 2  # type: ignore[arg-type]
    assert len(arrive(coming, run)) == 2
    assert (coming.count, coming.restart) == (0, True)
    assert coming.give_way(run, 1) == ((), ()), "they are its own"  # type: ignore[arg-type]


def test_who_adds_some_before_it_starts_has_no_more_than_that() -> None:
    coming, run = ComingBack(), Run()
    coming.note(run, 2, restart=False)  # type: ignore[arg-type]
    coming.give_way(run, 1)  # type: ignore[arg-type]
    assert coming.begin(run) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(("added", "comes"), [(0, 2), (1, 0)])
def test_a_run_that_takes_the_place_has_as_many_unless_it_was_given_some_of_its_own(added: int, comes: int) -> None:
    """Which are being started, perhaps, while those of the old run have yet to leave."""
    coming, old, new = ComingBack(), Run(), Run()
    if added:
        coming.give_way(new, added)  # type: ignore[arg-type]
    coming.note(old, 2, restart=False)  # type: ignore[arg-type]
    assert coming.begin(new) == comes  # type: ignore[arg-type]


@pytest.mark.parametrize(("count", "stay", "leave"), [(1, 1, 1), (2, 2, 0), (3, 2, 0)])
def test_those_that_came_by_themselves_are_among_those_that_are_added(count: int, stay: int, leave: int) -> None:
    """Cells in which the run starts before local peers are added: there are not more of them each time."""
    coming, old, new = ComingBack(), Run(), Run()
    coming.note(old, 2, restart=False)  # type: ignore[arg-type]
    coming.begin(new)  # type: ignore[arg-type]
    came = tuple(arrive(coming, new))
    assert coming.give_way(new, count) == (came[:stay], came[stay : stay + leave])  # type: ignore[arg-type]
    assert coming.give_way(new, count) == ((), ()), "they are its own by now"  # type: ignore[arg-type]


def test_those_that_nobody_wants_do_not_come() -> None:
    coming, run = ComingBack(), Run()
    coming.note(run, 3, restart=False)  # type: ignore[arg-type]
    coming.forget(1)
    assert coming.count == 2
    coming.forget()
    assert coming.begin(run) == 0  # type: ignore[arg-type]
