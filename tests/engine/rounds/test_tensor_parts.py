"""How tensors are cut into parts: alike at all peers, and so that each of them averages its share."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hivemind.averaging.partition import TensorPartContainer

from hivenb.engine.rounds.tensor_parts import SHORTEST_PART, part_size

LONGEST = 2**19


def shares(lengths: Sequence[int], fractions: Sequence[float]) -> list[float]:
    """What each peer averages of tensors of such lengths, as a share of all."""
    tensors = [torch.zeros(length) for length in lengths]
    size = part_size(4 * sum(lengths), fractions, LONGEST)
    container = TensorPartContainer(tensors, fractions, part_size_bytes=size)
    own = [sum(part.numel() for part, _ in parts) for parts in container._input_parts_by_peer]
    return [count / sum(lengths) for count in own]


@pytest.mark.parametrize("peers", [2, 3, 4, 8])
def test_a_small_model_is_shared_out(peers: int) -> None:
    assert shares([10_000], [1.0] * peers) == pytest.approx([1 / peers] * peers, abs=0.51 / peers)
    alone = TensorPartContainer([torch.zeros(10_000)], [1.0] * peers, part_size_bytes=LONGEST)
    assert sorted(alone.num_parts_by_peer)[-2] == 0, "hivemind lets one peer average all of it"


def test_each_gets_its_share_wherever_tensors_end() -> None:
    lengths = [6000, 64, 9000, 10, 3000, 500, 7000]
    assert shares(lengths, [1.0] * 4) == pytest.approx([0.25] * 4, abs=0.13)


def test_who_averages_nothing_is_not_counted() -> None:
    assert part_size(80_000, [1.0, 0.0, 1.0], LONGEST) == 20_000
    assert shares([20_000], [1.0, 0.0, 1.0]) == [0.5, 0.0, 0.5]


def test_parts_of_a_large_model_are_as_long_as_they_may_be() -> None:
    assert part_size(4 * 10**7, [1.0] * 4, LONGEST) == LONGEST


def test_parts_are_not_cut_to_bits() -> None:
    assert part_size(400, [1.0] * 4, LONGEST) == SHORTEST_PART
    assert part_size(400, [1.0] * 4, 128) == 128, "unless the user wants it so"
