"""Real peers with BatchNorm, each on data that lie elsewhere: their statistics are the swarm's, and a joiner's too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tiny import DELAYS

from strategy.peer import Moment, NormModel
from strategy.peers import Peer, Start, assert_they_met, meet, met, starting_peers, stop, train_all

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(400)]

#: Of the data of the two peers.
SHIFTS = (-20.0, 26.0)

#: By how much averages of such numbers may differ, which each peer makes of its own and the other's by itself.
ROUNDING = 4 * float(np.spacing(np.float32(max(SHIFTS))))


def settings(shift: float, **strategy: Any) -> dict[str, Any]:
    return {"module": NormModel, "model": {"shift": shift}, "strategy": {"averaging_timeout": 8.0, **strategy}}


def mean_of(moment: Moment) -> np.ndarray:
    return moment.buffers["layer.1.running_mean"]


def count_of(moment: Moment) -> int:
    return int(moment.buffers["layer.1.num_batches_tracked"])


@pytest.fixture(scope="module")
def two() -> Iterator[list[Peer]]:
    """Two that have trained three times, one after the other: to start them takes longest."""
    with starting_peers() as start:
        yield train_all(
            start,
            *(
                [
                    settings(shift, run_id="synchronous"),
                    settings(shift, run_id="offloaded", offload_optimizer=True),
                    {**settings(shift, run_id="own", average_buffers=False), "epochs": 6},
                ]
                for shift in SHIFTS
            ),
        )


@pytest.mark.parametrize("stage", [0, 1], ids=["synchronous", "offloaded"])
def test_peers_on_other_data_have_the_same_statistics_after_each_epoch(two: list[Peer], stage: int) -> None:
    assert_they_met(two, stage)
    first, second = (peer.since(0, stage) for peer in two)
    for one, other in zip(first, second, strict=True):
        assert one.epoch == other.epoch
        for name, value in one.buffers.items():
            np.testing.assert_allclose(value, other.buffers[name], rtol=1e-5, atol=ROUNDING)
        assert count_of(one) > 0
        assert (abs(mean_of(one)) < 15).all(), "what lies between them"
        assert (one.buffers["layer.1.running_var"] > 0).all()


def test_with_everything_in_the_background_they_stay_close(start_peer: Start) -> None:
    """Between two averages each moves by a third of the way to its own data; without any they would be there."""
    momentum, distance = 0.03, SHIFTS[1] - SHIFTS[0]
    peers: list[Peer] = []
    for number, shift in enumerate(SHIFTS):
        own = {**settings(shift, **DELAYS), "epochs": None, "target": 256}
        own["model"]["momentum"] = momentum
        addresses = peers[0].wait_until(lambda: peers[0].addresses, "its addresses") if peers else ()
        peers.append(start_peer(number, own, addresses=addresses))

    def are_close(epoch: int) -> bool:
        one, other = (met(peer, epoch, 2)[epoch] for peer in peers)
        assert min((1 - momentum) ** count_of(moment) for moment in (one, other)) < 0.1
        return bool((abs(mean_of(one) - mean_of(other)) < 0.6 * distance).all())

    meet(peers, 6, are_close)
    stop(peers)


def test_without_them_each_keeps_its_own(two: list[Peer]) -> None:
    for peer, shift in zip(two, SHIFTS, strict=True):
        np.testing.assert_allclose(mean_of(peer.since(0, 2)[-1]) / shift, 1.0, atol=0.3)


def test_one_that_joins_begins_with_the_trained_statistics(start_peer: Start) -> None:
    """They are never averaged here: what it has, it has from its download."""
    own = settings(SHIFTS[0], average_state_every=1000)
    own["model"]["momentum"] = 0.001
    first = start_peer(0, {**own, "epochs": None})
    trained = first.wait_for_epoch(5)
    late = start_peer(1, {**own, "epochs": None}, addresses=first.addresses)
    epoch = late.wait_for_epoch(trained.epoch, group_size=2)
    stop([first, late])
    assert_begins_with(late, trained)
    assert count_of(epoch) > count_of(trained)


def assert_begins_with(late: Peer, trained: Moment) -> None:
    begun, first = late.begun(), late.since(0)[0]
    assert count_of(begun) == 0 or count_of(begun) >= count_of(trained)
    assert count_of(first) > count_of(trained)
    assert (mean_of(first) / mean_of(trained) >= 1).all(), "it moves on from there, in the same direction"
