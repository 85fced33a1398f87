"""What a module changes in its parameters itself is kept, whatever is made of copies of them meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from averager_of_two import averager_of_two
from in_memory.real_time import RealTimeDHT
from torch import Tensor, nn

from hivenb.engine.averaging.module_changes import merged
from hivenb.engine.averaging.state_averager import TrainingStateAverager

INF, NAN = torch.inf, torch.nan


@pytest.mark.parametrize(
    ("now", "last", "other", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], [3.0, 4.0], None),
        ([0.0, 2.0], [1.0, 2.0], [1.0, 2.5], [0.0, 2.5]),
        ([1.5, 0.1], [1.0, 0.3], [3.0, 0.3], [3.5, 0.1]),
        ([-INF, 5.0], [-INF, 2.0], [-INF, 2.0], [-INF, 5.0]),
        ([1.0, 2.0], [-INF, 2.0], [-INF, 3.0], [1.0, 3.0]),
        ([NAN, 3.0], [NAN, 2.0], [1.0, 2.0], [1.0, 3.0]),
    ],
    ids=["nothing", "one each", "both", "infinite", "no longer infinite", "nan"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_changes_count(
    now: list[float], last: list[float], other: list[float], expected: list[float] | None, dtype: torch.dtype
) -> None:
    got = merged(torch.tensor(now, dtype=dtype), torch.tensor(last, dtype=dtype), torch.tensor(other))
    assert (got is None) == (expected is None)
    assert expected is None or torch.allclose(got, torch.tensor(expected), rtol=0.02)


def test_what_half_precision_has_rounded_is_no_change() -> None:
    exact = torch.tensor([1.0001, 2.0])
    half = exact.bfloat16()
    value = merged(torch.tensor([half[0], 5.0], dtype=torch.bfloat16), half, exact)
    assert torch.equal(value, torch.tensor([1.0001, 5.0]))


class Peer:
    """A peer with one matrix in rounds of the state.

    :param number: all that its matrix has in the beginning
    """

    def __init__(self, number: float, dht: RealTimeDHT, run_id: str, offload: bool):
        self.layer = nn.Linear(3, 2, bias=False)
        with torch.no_grad():
            self.layer.weight.fill_(number)
        sgd = partial(torch.optim.SGD, lr=1.0)
        chosen = (
            {"optimizer": sgd, "params": [self.layer.weight]} if offload else {"optimizer": sgd([self.layer.weight])}
        )
        self.averager = averager_of_two(
            TrainingStateAverager,
            **chosen,
            dht=dht,
            prefix=run_id,
            offload_optimizer=offload,
            custom_gradients=offload,
        )

    def begin(self, timeout: float = 60.0, **kwargs: Any) -> None:
        self.averager.step(averaging_round=True, delay_averaging=True, averaging_opts={"timeout": timeout}, **kwargs)

    def finish(self) -> None:
        self.averager.step(wait_for_delayed_updates=True)


@pytest.fixture
def peers(
    memory_dht: RealTimeDHT, joining_memory_dht: RealTimeDHT, run_id: str, request: pytest.FixtureRequest
) -> Iterator[list[Peer]]:
    """Two of one run, without processes."""
    dhts = memory_dht, joining_memory_dht
    made = [Peer(float(number), own, run_id, request.param) for number, own in enumerate(dhts)]
    yield made
    for peer in made:
        peer.averager.shutdown()


def by_data(weight: Tensor) -> None:
    weight.data[0] += 1.0


def in_place(weight: Tensor) -> None:
    with torch.no_grad():
        weight[0].add_(1.0)


@pytest.mark.parametrize("peers", [False, True], indirect=True, ids=["on its device", "offloaded"])
@pytest.mark.parametrize("change", [by_data, in_place])
def test_a_round_in_the_background_keeps_it(
    peers: list[Peer], change: Callable[[Tensor], None], eventually: Callable[..., None]
) -> None:
    for peer in peers:
        peer.begin()
    averager = peers[0].averager
    eventually(lambda: averager.offload_optimizer or averager._meanwhile._is_under_way)  # it has been read
    change(peers[0].layer.weight)
    for peer in peers:
        peer.finish()
    assert peers[1].layer.weight.tolist() == [[0.5] * 3] * 2
    assert peers[0].layer.weight.tolist() == [[1.5] * 3, [0.5] * 3]
    for peer in peers:  # and the next one averages it
        peer.begin()
    for peer in peers:
        peer.finish()
    for peer in peers:
        assert peer.layer.weight.tolist() == [[1.0] * 3, [0.5] * 3]


@pytest.mark.parametrize("peers", [False, True], indirect=True, ids=["on its device", "offloaded"])
def test_a_state_that_is_taken_over_replaces_it(peers: list[Peer], eventually: Callable[..., None]) -> None:
    first, second = peers
    first.averager.local_epoch = first.averager.state_sharing_priority = 3
    first.averager.allow_state_sharing = True
    by_data(second.layer.weight)

    def is_taken_over() -> bool:
        second.averager.load_state_from_peers(timeout=10.0)
        return second.averager.local_epoch == 3

    eventually(is_taken_over)
    assert torch.equal(second.layer.weight, first.layer.weight)
    second.begin(timeout=5.0)  # nobody comes
    second.finish()
    assert torch.equal(second.layer.weight, first.layer.weight)
