"""Samples of a batch that several loaders have given, in whatever collection and mode, are those of all of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, TensorDataset

from hivenb.strategy.counted_batches import SampleCount, batches_in


def loader(samples: int, batch_size: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(samples, 3), torch.zeros(samples)), batch_size)


def counted(combined: CombinedLoader) -> Iterator[int]:
    count = SampleCount()
    for batch, _, _ in combined:
        count.look_at(batch, None, combined.iterables)
        yield count.in_batch


@pytest.mark.parametrize("hold", [lambda a, b: [a, b], lambda a, b: {"a": a, "b": b}, lambda a, b: {"x": [a, (b,)]}])
@pytest.mark.parametrize(
    ("mode", "expected"),
    [("min_size", [12, 12]), ("max_size_cycle", [12, 12, 12, 10]), ("max_size", [12, 12, 8, 6])],
)
def test_all_loaders_count_and_those_that_are_through_do_not(hold: Any, mode: Any, expected: list[int]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # sizes differ between loaders, and in none of them
        assert list(counted(CombinedLoader(hold(loader(8, 4), loader(30, 8)), mode))) == expected


def test_one_batch_is_no_collection_of_loaders() -> None:
    batch = [torch.zeros(4, 3), torch.zeros(4)]
    assert batches_in(batch, loader(8, 4)) == batches_in(batch, None) == [batch]
    count = SampleCount()
    count.look_at(batch, None, [loader(8, 4)])  # after a hook that has taken it out of its list
    assert count.in_batch == 4
    count.look_at(batch, 7, {"a": loader(8, 4)})
    assert count.in_batch == 7


def test_a_batch_of_unclear_size_is_warned_of_for_its_loader() -> None:
    with pytest.warns(UserWarning, match="taken for 4 samples: its first tensor .* another one in it has 5"):
        SampleCount().look_at({"a": [torch.zeros(4), torch.zeros(5)], "b": torch.zeros(8)}, None, {"a": 0, "b": 0})
