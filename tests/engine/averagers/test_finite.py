"""One value that is not finite is found, wherever it is; and large ones are none."""

from __future__ import annotations

import math

import pytest
import torch

from hivenb.engine.averagers.finite import are_finite, where_not_finite


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_in_one_of_many_is_found(dtype: torch.dtype, value: float) -> None:
    tensors = [torch.ones(3, 2, dtype=dtype), None, torch.ones(1001, dtype=dtype), torch.zeros(0)]
    assert are_finite(tensors)
    tensors[2][1000] = value
    assert not are_finite(tensors)
    assert where_not_finite(tensors) == "nan or inf in 1 of 3 gradients, the first of shape (1001,)"


@pytest.mark.parametrize(
    ("dtype", "large"), [(torch.float16, 6e4), (torch.float32, 1e38), (torch.bfloat16, 1e38), (torch.float64, 1e300)]
)
def test_large_numbers_are_finite(dtype: torch.dtype, large: float) -> None:
    """Though their squares, or their sum, are not."""
    assert are_finite([torch.full((100,), large, dtype=dtype), torch.ones(2)])


def test_of_a_sparse_one_its_values_count() -> None:
    tensor = torch.eye(3).to_sparse()
    assert are_finite([tensor])
    assert not are_finite([tensor * math.nan])


def test_nothing_is_finite() -> None:
    assert are_finite([])
    assert are_finite([None])
    assert where_not_finite([]) == "nan or inf in 0 of 0 gradients"
