"""Tensors that no codec touches, and the largest of what several peers have sent."""

from __future__ import annotations

import asyncio

import pytest
import torch
from hivemind.compression import CompressionInfo, Float16Compression, deserialize_torch_tensor

from hivenb.engine.exchange.exact_tensors import ExactKey, LargestOfAll, SendsExactly
from hivenb.engine.exchange.reducer import FaultTolerantReducer, PartRules


def test_a_codec_is_for_all_but_them() -> None:
    codec, values = SendsExactly(Float16Compression()), torch.tensor([1e6, 1e-9])
    own, other = (CompressionInfo.from_tensor(values, key=key) for key in (ExactKey(), 0))
    assert torch.equal(deserialize_torch_tensor(codec.compress(values, own)), values)
    assert deserialize_torch_tensor(codec.compress(values, other)).tolist() == [65504, 0]
    assert torch.equal(codec.extract(codec.compress(values, other)), torch.tensor([65504.0, 0.0]))
    assert [codec.estimate_compression_ratio(info) for info in (own, other)] == [1.0, 0.5]


@pytest.mark.parametrize(
    ("weights", "expected"), [((1, 2), [7, 5]), ((1, 0), [7, 1]), ((0, 1), [3, 5]), ((0, 0), [7, 5])]
)
def test_the_largest_is_that_of_peers_with_a_weight(weights: tuple[float, float], expected: list[int]) -> None:
    largest = LargestOfAll()
    for weight, part in zip(weights, ([7, 1], [3, 5]), strict=True):
        largest.add_(torch.tensor(part), alpha=weight)
    assert largest.div_(sum(weights)).tolist() == expected


def test_a_reducer_takes_it_of_those_parts_alone() -> None:
    async def reduce() -> list[torch.Tensor]:
        reducer = FaultTolerantReducer([torch.Size([2])] * 3, 2, PartRules(largest={1}))
        found = []
        for number in range(3):
            parts = (torch.tensor([2.0**52 + 1, 1.0], dtype=torch.float64), torch.tensor([0.0, 3.0]).double())
            both = (reducer.accumulate_part(sender, number, part) for sender, part in enumerate(parts))
            found.append((await asyncio.gather(*both))[0])
        return found

    first, second, third = asyncio.run(reduce())
    assert first[1].item() == third[1].item() == 2
    assert second.tolist() == [2**52 + 1, 3]
