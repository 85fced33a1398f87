"""Fixtures of tests with several real peers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from strategy.peers import Start, Swarm, starting_peers, train_all


@pytest.fixture
def start_peer() -> Iterator[Start]:
    """Starts a peer in a process of its own, which ends with the test."""
    with starting_peers() as start:
        yield start


@pytest.fixture
def train_together(start_peer: Start) -> Swarm:
    """Trains with peers whose settings are given, and returns them when all have finished."""
    return partial(train_all, start_peer)
