"""One value that is not finite is found, wherever it is; and large ones are none."""

from __future__ import annotations

import math

import pytest
import torch

from hivenb.engine.averaging.finite import LateVerdict, are_finite, can_be_judged_late, norm_of, where_not_finite

ON_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


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


@pytest.mark.parametrize(("value", "expected"), [(1.0, True), (complex(0, math.nan), False)])
def test_complex_numbers_are_judged_as_autograd_leaves_them(value: complex, expected: bool) -> None:
    """Conjugated, but not yet in memory."""
    assert are_finite([torch.full((3,), value, dtype=torch.complex64).conj(), torch.ones(2)]) is expected


def test_the_norm_is_of_all_numbers_together() -> None:
    assert norm_of([]) == 0.0
    both = [torch.full((2, 2), 3.0), torch.full((), 8.0, dtype=torch.float64), torch.full((1,), 0j)]
    assert norm_of(both) == pytest.approx(10.0)
    assert not math.isfinite(norm_of([torch.ones(2), torch.full((2,), math.nan)]))
    assert norm_of([torch.full((1,), 1e15), torch.full((1,), 1e15)]) == pytest.approx(1e15 * math.sqrt(2))


def test_of_a_sparse_one_its_values_count() -> None:
    tensor = torch.eye(3).to_sparse()
    assert are_finite([tensor])
    assert not are_finite([tensor * math.nan])


def test_nothing_is_finite() -> None:
    assert are_finite([])
    assert are_finite([None])
    assert where_not_finite([]) == "nan or inf in 0 of 0 gradients"


DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, ON_CUDA])]


class TestLateVerdict:
    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_it_is_that_of_all_and_silences_what_is_not_finite(
        self, dtype: torch.dtype, value: float, device: str
    ) -> None:
        good = [torch.full((3, 2), 6e4, dtype=dtype, device=device), torch.rand(1001, device=device).to(dtype)]
        bad = [one.clone() for one in good]
        bad[1][1000] = value
        for tensors, is_finite in ((good, True), (bad, False)):
            before = [one.clone() for one in tensors]
            verdict = LateVerdict(tensors)
            verdict.silence(tensors)
            assert bool(verdict) is is_finite
            for one, other in zip(tensors, before, strict=True):
                assert torch.equal(one, other if is_finite else torch.zeros_like(other))
        assert verdict.where() == "nan or inf in 1 of 2 gradients, the first of shape (1001,)"

    @pytest.mark.gpu
    @ON_CUDA
    def test_only_gradients_of_a_gpu_that_are_alike_are_judged_late(self) -> None:
        one = torch.ones(3, device="cuda")
        assert can_be_judged_late([one, one])
        for other in (one.cpu(), one.half(), one.to_sparse(), one[:0], one.to(torch.complex64)):
            assert not can_be_judged_late([one, other])

    def test_those_of_a_cpu_are_judged_at_once(self) -> None:
        assert not can_be_judged_late([torch.ones(3)])
