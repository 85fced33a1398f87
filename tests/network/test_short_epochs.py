"""Over a long line, two peers end each of their short epochs together, though a look at the swarm takes longer."""

from __future__ import annotations

import pytest

from network.internet import Internet, why_not
from network.line import Line
from network.trainers import ask, training, wait_for_groups

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

#: Samples of both together in half a second, and epochs that are looked at.
TARGET, EPOCHS = 400, 15


@pytest.fixture(scope="module", autouse=True)
def allowed() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.mark.slow
def test_no_epoch_is_missed_once_they_have_met() -> None:
    line = Line(delay=0.075, jitter=0.004)
    with Internet([line, line]) as internet, training(internet, ["Ann", "Bob"], TARGET) as peers:
        first = max(max(ask(one).groups) for one in peers) + 1
        wait_for_groups(peers[0], 2, EPOCHS, after=first)
        told = [ask(one).groups for one in peers]
    print(told)
    epochs = range(first, min(max(groups) for groups in told) + 1)
    assert [[groups.get(epoch) for epoch in epochs] for groups in told] == [[2] * len(epochs)] * 2
