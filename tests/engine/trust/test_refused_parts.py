"""What cannot be averaged is refused, who sent it is named, and all else of a round is as if that peer had not come."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from hivemind.averaging.partition import TensorPartContainer
from hivemind.compression import CompressionInfo
from hivemind.p2p import PeerID
from hivemind.utils import get_logger

from hivenb.compression import codec
from hivenb.engine.trust.aggregation import (
    LARGEST_NORM,
    LARGEST_WEIGHT,
    CheckedParts,
    Gathered,
    RefusedPart,
    checked_norm,
    checked_weight,
    norm_of,
)

logger = get_logger(__name__)

NOT_TO_BE_ADDED = {
    "nan": torch.tensor([1.0, math.nan]),
    "infinity": torch.tensor([1.0, -math.inf]),
    "1e30": torch.tensor([1.0, 1e30]),
    "1e30 of doubles": torch.tensor([1.0, 1e30], dtype=torch.float64),
    "nan of half precision": torch.tensor([1.0, math.nan], dtype=torch.float16),
    "one number for all": torch.tensor([1.0]),
    "another shape": torch.ones(2, 1),
    "complex": torch.ones(2, dtype=torch.complex64),
}


@pytest.mark.parametrize("part", NOT_TO_BE_ADDED.values(), ids=NOT_TO_BE_ADDED)
def test_what_cannot_be_averaged_is_refused(part: torch.Tensor) -> None:
    with pytest.raises(RefusedPart):
        checked_norm(part, torch.Size([2]), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_all_types_of_numbers_are_taken(dtype: torch.dtype) -> None:
    part = torch.tensor([3.0, -4.0], dtype=dtype, requires_grad=True)
    assert checked_norm(part, torch.Size([2]), torch.float32) == 5.0
    assert checked_norm(torch.full((70_000,), 1.0, dtype=dtype), torch.Size([70_000]), torch.float32) == pytest.approx(
        math.sqrt(70_000)
    )


def test_integers_and_nothing_at_all_are_finite() -> None:
    assert checked_norm(torch.tensor([2**60]), torch.Size([1]), torch.int64) == 0.0
    assert norm_of(torch.zeros(0)) == 0.0
    with pytest.raises(RefusedPart):  # as the largest value it would make numbers of them
        checked_norm(torch.ones(1), torch.Size([1]), torch.int64)


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf, -1e-9, 10 * LARGEST_WEIGHT])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    with pytest.raises(RefusedPart, match="weight"):
        checked_weight(weight)


def test_sums_of_what_is_taken_are_finite_and_so_are_its_codecs() -> None:
    """However many there are, and whatever their weights."""
    largest = torch.full((4,), LARGEST_NORM / 2)
    assert checked_norm(largest, torch.Size([4]), torch.float32)
    assert bool(torch.zeros(4).add_(largest, alpha=LARGEST_WEIGHT * 1e7).isfinite().all())
    numbers = torch.linspace(-1, 1, 4096) * (LARGEST_NORM / 64)
    assert checked_norm(numbers, torch.Size([4096]), torch.float32)
    for name in ("float16", "scaled_float16", "uniform8bit", "quantile8bit"):
        chosen = codec(name)
        sent = chosen.extract(chosen.compress(2 * numbers, CompressionInfo.from_tensor(numbers)))
        assert bool(sent.isfinite().all()), name


def test_who_was_refused_travels_with_the_outcome_of_a_round() -> None:
    peer = PeerID(b"peer")
    sent = pickle.loads(pickle.dumps(Gathered({peer: 3}, {PeerID(b"bad"): "nan"})))
    assert sent == {peer: 3}
    assert sent.refused == {PeerID(b"bad"): "nan"}


class TestCheckedParts:
    def test_an_average_that_was_refused_is_replaced_by_what_this_peer_has(self) -> None:
        refused: list[tuple[int, str]] = []
        parts = CheckedParts.of(
            TensorPartContainer([torch.ones(4), torch.ones(4)], [0.5, 0.5]), lambda *told: refused.append(told)
        )
        parts.register_processed_part(0, 0, torch.ones(4))
        with pytest.raises(RefusedPart):
            parts.register_processed_part(1, 0, torch.full((4,), math.nan))
        parts.register_failed_reducer(1)
        assert [peer for peer, _ in refused] == [1]
        assert [float(found[0].sum()) for found in parts._output_parts_by_peer] == [4.0, 0.0]
        parts.finalize()

    def test_more_parts_than_there_are_are_refused(self) -> None:
        parts = CheckedParts.of(TensorPartContainer([torch.ones(4)], [1.0]), lambda *told: None)
        parts.register_processed_part(0, 0, torch.ones(4))
        with pytest.raises(RefusedPart, match="one more"):
            parts.register_processed_part(0, 1, torch.ones(4))
        parts.finalize()
