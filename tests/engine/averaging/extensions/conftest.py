"""Two peers of a run, each with an averager of its state. A module says as its ``Peer`` what else one has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from in_memory.real_time import RealTimeDHT

from hivenb.engine.network.dht import DHT


@pytest.fixture
def make_peer(
    request: pytest.FixtureRequest, memory_dht: RealTimeDHT, joining_memory_dht: RealTimeDHT, run_id: str
) -> Iterator[Callable[..., Any]]:
    """Makes the first and the second peer of a run, without processes."""
    yield from _peers(request.module.Peer, [memory_dht, joining_memory_dht], run_id)


@pytest.fixture
def start_peer(request: pytest.FixtureRequest, dht: DHT, joining_dht: DHT, run_id: str) -> Iterator[Callable[..., Any]]:
    """Starts them in processes."""
    yield from _peers(request.module.Peer, [dht, joining_dht], run_id)


def _peers(kind: Callable[..., Any], dhts: Sequence[Any], run_id: str) -> Iterator[Callable[..., Any]]:
    """Makes peers, and ends their averagers.

    :param kind: takes the number of a peer, its DHT and the name of the run, and what a test says by keyword
    """
    made: list[Any] = []

    def make(**kwargs: Any) -> Any:
        made.append(kind(len(made), dhts[len(made)], run_id, **kwargs))
        return made[-1]

    yield make
    for peer in made:
        if peer.averager.is_alive():
            peer.averager.shutdown()
