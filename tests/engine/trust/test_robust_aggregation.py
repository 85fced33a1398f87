"""Contributions of a usual size count, whatever the batches; larger ones are refused, and clipping leaves no force."""

from __future__ import annotations

import math

import pytest
import torch

from hivenb.engine.trust.aggregation import (
    FACTOR,
    FACTOR_OF_AVERAGES,
    LARGEST_NORM,
    NO_WEIGHT,
    REMEMBERED,
    RULES,
    CenteredClipping,
    NormBounds,
    RefusedPart,
    UsualNorms,
    centered_clip,
    noise_of,
)
from hivenb.options.kinds import AGGREGATIONS


def bounds(usual: UsualNorms, *parts: float, weight: float = 8.0) -> NormBounds:
    """Of a peer that averages parts of such norms, while another one averages one more of norm 1."""
    own = [torch.tensor([part]) for part in parts]
    return NormBounds(usual, b"", [own, [torch.ones(1)]], 0, weight)


def test_the_options_offer_these_rules() -> None:
    assert tuple(AGGREGATIONS) == RULES


class TestUsualNorms:
    def test_it_is_the_median_of_the_last_ones(self) -> None:
        usual = UsualNorms()
        assert usual.usual(("part",)) == 0.0
        for norm in (1.0, 3.0, 1e9):
            usual.note(("part",), norm)
        assert usual.usual(("part",)) == 3.0
        for _ in range(REMEMBERED):
            usual.note(("part",), 2.0)
        assert usual.usual(("part",)) == 2.0


class TestNormBounds:
    def test_what_is_as_large_as_a_peers_own_is_taken_and_what_is_many_times_as_large_is_not(self) -> None:
        round_ = bounds(UsualNorms(), 3.0, 4.0)
        round_.check_sent(1, 0, 5.0 * FACTOR / 2, 8.0)
        with pytest.raises(RefusedPart, match="its norm is 1e"):
            round_.check_sent(2, 0, 5e6, 8.0)
        with pytest.raises(RefusedPart):  # what is below the bound part for part adds up
            round_.check_sent(1, 1, 5.0 * FACTOR * 0.9, 8.0)

    def test_earlier_rounds_count_where_this_peers_own_is_small(self) -> None:
        usual = UsualNorms()
        for _ in range(3):
            bounds(usual, 100.0)
        bounds(usual, 1e-6).check_sent(1, 0, 100.0, 8.0)

    def test_a_gradient_that_has_grown_has_grown_for_all(self) -> None:
        usual = UsualNorms()
        for _ in range(REMEMBERED):
            bounds(usual, 1.0)
        bounds(usual, 1e4).check_sent(1, 0, 1e4, 8.0)

    def test_one_who_sends_too_much_changes_nothing_in_what_is_usual(self) -> None:
        usual = UsualNorms()
        for _ in range(2 * REMEMBERED):
            round_ = bounds(usual, 1.0)
            round_.check_sent(1, 0, 1.0, 8.0)
            with pytest.raises(RefusedPart):
                round_.check_sent(2, 0, 2 * FACTOR, 8.0)

    def test_the_mean_of_a_few_samples_may_be_noisier(self) -> None:
        usual = UsualNorms()
        round_ = bounds(usual, 1.0, weight=800.0)
        round_.check_sent(1, 0, 5 * FACTOR, 8.0)
        with pytest.raises(RefusedPart):
            round_.check_sent(2, 0, 5 * FACTOR, 800.0)
        assert noise_of(8.0, 800.0) == 10.0
        assert noise_of(800.0, 8.0) == 1.0

    @pytest.mark.parametrize("weight", [0.0, NO_WEIGHT, 1e-9])
    def test_a_peer_without_samples_knows_nothing_by_its_own(self, weight: float) -> None:
        usual = UsualNorms()
        bounds(usual, 1.0, weight=weight).check_sent(1, 0, 1e9, 8.0)
        bounds(usual, 0.0, weight=weight).check_sent(1, 0, 1e9, 8.0)
        with pytest.raises(RefusedPart):
            bounds(usual, 0.0, weight=weight).check_sent(1, 0, 1e15, 8.0)

    def test_its_own_that_is_not_finite_is_no_measure(self) -> None:
        usual = UsualNorms()
        bounds(usual, 1.0)
        for own in (math.nan, math.inf, 10 * LARGEST_NORM):
            with pytest.raises(RefusedPart):
                bounds(usual, own).check_sent(1, 0, 1e6, 8.0)

    def test_averages_are_bounded_too_and_have_more_room(self) -> None:
        round_ = bounds(UsualNorms(), 5.0)
        round_.check_average(1, FACTOR_OF_AVERAGES / 2)
        with pytest.raises(RefusedPart):
            round_.check_average(1, FACTOR_OF_AVERAGES)

    def test_phases_of_a_round_and_other_cuts_know_nothing_of_each_other(self) -> None:
        usual = UsualNorms()
        bounds(usual, 1e6)
        with pytest.raises(RefusedPart):
            NormBounds(usual, b"Q", [[torch.ones(1)], [torch.ones(1)]], 0, 8.0).check_sent(1, 0, 1e6, 8.0)
        with pytest.raises(RefusedPart):
            NormBounds(usual, b"", [[torch.ones(1)], []], 0, 8.0).check_sent(1, 0, 1e6, 8.0)


class TestCenteredClipping:
    @pytest.fixture
    def honest(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        gradient = torch.randn(50, 20, generator=generator)
        return [gradient + 0.5 * torch.randn(50, 20, generator=generator) for _ in range(5)]

    def test_without_an_attack_it_is_the_mean(self, honest: list[torch.Tensor]) -> None:
        assert torch.allclose(centered_clip(honest, [8.0] * 5), torch.stack(honest).mean(0), atol=1e-5)

    @pytest.mark.parametrize("times", [-1.0, -10.0, 1e6, -1e6, 1e15])
    @pytest.mark.parametrize("count", [1, 2])
    def test_fewer_than_half_cannot_turn_it_around(self, honest: list[torch.Tensor], times: float, count: int) -> None:
        mean = torch.stack(honest).mean(0)
        sent = [*honest, *[times * mean] * count]
        found = centered_clip(sent, [8.0] * 5 + [1e9] * count)
        assert (found - mean).norm() < 0.5 * mean.norm()

    def test_of_two_nobody_can_tell_who_is_right(self) -> None:
        assert centered_clip([torch.zeros(2), torch.ones(2)], [1.0, 1.0]).tolist() == [0.5, 0.5]
        assert centered_clip([torch.ones(2)], [NO_WEIGHT]).tolist() == [1.0, 1.0]

    def test_those_who_have_the_same_are_not_moved(self) -> None:
        same, other = torch.ones(3), torch.full((3,), 9.0)
        assert centered_clip([same, same, same, other], [1.0] * 4).tolist() == [1.0] * 3

    def test_whoever_has_no_weight_does_not_count(self) -> None:
        parts = [torch.zeros(1), torch.full((1,), 0.1), torch.full((1,), 0.2), torch.full((1,), 0.1)]
        assert centered_clip(parts, [1.0, 1.0, 1.0, NO_WEIGHT]).item() == pytest.approx(0.1, abs=0.05)

    @pytest.mark.parametrize(
        ("given", "expected"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)], ids=str
    )
    def test_it_is_in_single_precision_at_least(self, given: torch.dtype, expected: torch.dtype) -> None:
        gathered = CenteredClipping()
        for value in (1.0, 2.0, 3.0):
            gathered.add_(torch.full((2, 2), value, dtype=given), alpha=4.0)
        found = gathered.div_(12.0)
        assert (found.dtype, found.shape) == (expected, (2, 2))
        assert found.mean().item() == pytest.approx(2.0, abs=0.1)
