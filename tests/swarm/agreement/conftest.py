"""A swarm in which peers of plain hivemind can try to write what they may not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

import hivenb

_numbers = itertools.count(1)


@pytest.fixture
def swarm() -> Iterator[hivenb.Swarm]:
    """One of this machine alone, open to all, for one test."""
    with hivenb.Swarm(f"open-{next(_numbers)}", private=False) as opened:
        yield opened
