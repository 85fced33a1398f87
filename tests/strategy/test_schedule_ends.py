"""For how many of its steps a scheduler was made, as far as that can be read off it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
    StepLR,
)

from hivenb.strategy.schedule_ends import end_of, lengths_of, negative_length

Make = Callable[[torch.optim.Optimizer], Any]


def linear(step: int, *, num_warmup_steps: int, num_training_steps: int) -> float:
    return max(0.0, 1 - step / num_training_steps) + num_warmup_steps * 0.0


class Falling:
    def __init__(self, total: int):
        self.total = total

    def __call__(self, step: int) -> float:
        return 1 - step / self.total


class Own(LRScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer, total: int):
        self.total = total
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [0.1 * (1 - self.last_epoch / self.total)]


def closed_over(total: int) -> Make:
    return lambda optimizer: LambdaLR(optimizer, lambda step: 1 - step / total)


def with_warmup(optimizer: torch.optim.Optimizer) -> SequentialLR:
    schedulers = [LinearLR(optimizer, total_iters=2), CosineAnnealingLR(optimizer, T_max=6)]
    return SequentialLR(optimizer, schedulers, milestones=[2])


MADE: dict[str, tuple[Make, int | None]] = {
    "OneCycleLR": (lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=8), 7),
    "a closure": (closed_over(8), 8),
    "a default": (lambda optimizer: LambdaLR(optimizer, lambda step, total=8: 1 - step / total), 8),
    "an object": (lambda optimizer: LambdaLR(optimizer, Falling(8)), 8),
    "of transformers": (
        lambda optimizer: LambdaLR(optimizer, partial(linear, num_warmup_steps=1, num_training_steps=8)),
        8,
    ),
    "CosineAnnealingLR": (lambda optimizer: CosineAnnealingLR(optimizer, T_max=8), 8),
    "a warm-up before": (with_warmup, 8),
    "chained": (lambda optimizer: ChainedScheduler([ConstantLR(optimizer), CosineAnnealingLR(optimizer, 8)]), 8),
    "one's own": (lambda optimizer: Own(optimizer, 8), 8),
}


def made(make: Make) -> Any:
    return make(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1))


@pytest.mark.parametrize("name", MADE)
def test_one_that_is_made_for_the_training_ends_with_it(name: str) -> None:
    make, end = MADE[name]
    assert end_of(made(make), 8) == end
    assert 8 in lengths_of(made(make))


def test_one_that_knows_when_training_ends_needs_no_estimate() -> None:
    assert end_of(made(MADE["OneCycleLR"][0]), None) == 7
    assert end_of(made(MADE["of transformers"][0]), 4) == 8


def cosine_with_floor(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step, total=32: max(0.1, 0.5 * (1 + math.cos(math.pi * step / total))))


def with_long_warmup(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step, warmup=16, total=32: min(step / warmup, 1 - step / total))


@pytest.mark.parametrize(
    ("make", "end"),
    [
        (closed_over(32), 32),
        (partial(CosineAnnealingLR, T_max=24), 24),
        (lambda optimizer: CosineAnnealingLR(optimizer, T_max=24.0), 24),
        (with_long_warmup, 32),
        (cosine_with_floor, 32),
        (partial(Own, total=24), 24),
        (
            lambda optimizer: SequentialLR(
                optimizer, [LinearLR(optimizer, total_iters=2), CosineAnnealingLR(optimizer, T_max=22)], milestones=[2]
            ),
            24,
        ),
    ],
)
def test_one_that_is_made_for_several_peers_ends_as_well(make: Make, end: int) -> None:
    assert end_of(made(make), 8) == end
    assert end_of(made(make), 1) is None
    assert end_of(made(make), float("inf")) is None
    assert end_of(made(make), None) is None


@pytest.mark.parametrize(
    "make",
    [
        partial(CosineAnnealingLR, T_max=3),
        partial(CosineAnnealingWarmRestarts, T_0=8),
        partial(StepLR, step_size=8),
        closed_over(30),
        lambda optimizer: LambdaLR(optimizer, lambda step, warmup=16: min(1.0, step / warmup)),
        lambda optimizer: LambdaLR(optimizer, lambda step, warmup=16, total=30: min(step / warmup, 1 - step / total)),
    ],
)
def test_others_go_on(make: Make) -> None:
    assert end_of(made(make), 8) is None


def test_what_is_not_assigned_yet_is_no_number() -> None:
    def make(optimizer: torch.optim.Optimizer) -> LambdaLR:
        scheduler = LambdaLR(optimizer, lambda step: 1.0 if step == 0 else later)
        assert end_of(scheduler, 8) is None
        later = 0.5
        return scheduler

    made(make)


@pytest.mark.parametrize(
    ("make", "length"),
    [
        (partial(CosineAnnealingLR, T_max=-1), -1),
        (
            lambda optimizer: SequentialLR(
                optimizer, [ConstantLR(optimizer), CosineAnnealingLR(optimizer, T_max=-3)], milestones=[2]
            ),
            -3,
        ),
        (lambda optimizer: LambdaLR(optimizer, partial(linear, num_warmup_steps=0, num_training_steps=-1)), -1),
        (lambda optimizer: LambdaLR(optimizer, lambda step, power=-0.5: (step + 1) ** power), None),
        (partial(CosineAnnealingLR, T_max=3), None),
    ],
)
def test_a_negative_length_is_seen(make: Make, length: float | None) -> None:
    assert negative_length(made(make)) == length
