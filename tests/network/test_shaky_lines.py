"""Nobody takes a peer for gone whose line is long, uneven, or silent for two seconds; its rounds are everybody's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from network.internet import Internet, why_not
from network.line import Line
from network.trainers import ask, training, wait_for_groups

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

#: Seconds of a stall: as on a train, or while a phone changes its cell.
STALL = 2.0

ANN, BOB, FAR = range(3)


@pytest.fixture(scope="module", autouse=True)
def allowed() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def three(allowed: None) -> Iterator[tuple[Internet, list[Connection]]]:
    """Two peers near each other and one far away, 300 to 400 ms there and back, who have met; epochs of 2.5 s."""
    far = Line(delay=0.13, jitter=0.05)
    lines = [Line(delay=0.02, jitter=0.005)] * 2 + [far]
    with Internet(lines) as internet, training(internet, ["Ann", "Bob", "Far"], target=3000) as connections:
        yield internet, connections


@pytest.mark.slow
def test_a_line_of_300_ms_makes_nobody_a_ghost(three: tuple[Internet, list[Connection]]) -> None:
    _, peers = three
    first = max(ask(peers[ANN]).groups)
    told = wait_for_groups(peers[ANN], 3, 3, after=first)
    later = {epoch: size for epoch, size in told.groups.items() if epoch > first}
    print(later)
    assert set(later.values()) == {3}
    assert [ask(one).gone for one in peers] == [set()] * 3


@pytest.mark.slow
def test_stalls_of_two_seconds_make_nobody_a_ghost(three: tuple[Internet, list[Connection]]) -> None:
    internet, peers = three
    for _ in range(2):
        internet.change(FAR, is_cut=True)
        time.sleep(STALL)
        internet.change(FAR, is_cut=False)
        stalled = max(ask(peers[ANN]).groups)
        wait_for_groups(peers[ANN], 3, 2, after=stalled)
    told = [ask(one) for one in peers]
    print(told)
    assert [one.gone for one in told] == [set()] * 3


@pytest.mark.slow
def test_the_state_is_averaged_in_the_round_trip_of_the_gradients(three: tuple[Internet, list[Connection]]) -> None:
    _, peers = three
    first = max(ask(peers[ANN]).groups)
    wait_for_groups(peers[ANN], 3, 3, after=first)
    told = [ask(one) for one in peers]
    print(told)
    assert all(any(epoch > first for epoch in one.early) for one in told)
