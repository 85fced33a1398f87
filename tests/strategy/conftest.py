"""A swarm for the tests of this package, and fixtures of tests with several real peers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

import hivenb
from strategy.peers import Start, Swarm, starting_peers, train_all


@pytest.fixture(scope="package")
def swarm() -> Iterator[hivenb.Swarm]:
    """One of this machine alone, in which each test trains in a run of its own; see :func:`tiny.own_run`.

    To open and close one takes as much as a dozen short trainings.
    """
    with hivenb.Swarm("strategy") as opened:
        yield opened


@pytest.fixture
def start_peer() -> Iterator[Start]:
    """Starts a peer in a process of its own, which ends with the test."""
    with starting_peers() as start:
        yield start


@pytest.fixture
def train_together(start_peer: Start) -> Swarm:
    """Trains with peers whose settings are given, and returns them when all have finished."""
    return partial(train_all, start_peer)
