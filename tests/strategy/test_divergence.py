"""What is an explosion, and what is not: on real losses of small models, and on made ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts

from hivenb.strategy.divergence import IN_A_ROW, USUAL_AFTER, LossWatch
from hivenb.tasks import digits

CALM = {
    "momentum": ({}, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "a rate that is too high, which restarts": ({}, torch.optim.Adam, {"lr": 0.05}, 60),
    "batches of 4": ({"batch_size": 4}, torch.optim.Adam, {"lr": 1e-2}),
}


def losses_of(
    data: dict[str, Any],
    make: Callable[..., torch.optim.Optimizer],
    settings: dict[str, Any],
    restart: int = 0,
    batches: int = 160,
    explode_at: int | None = None,
) -> list[float]:
    """Of digits, in plain torch; from one batch on, if so wished, with a rate that no model stands."""
    torch.manual_seed(0)
    task = digits(**data)
    task.model.log_dict = task.model.log = lambda *args, **kwargs: None  # type: ignore[method-assign, assignment]
    optimizer = make(task.model.parameters(), **settings)
    scheduler = CosineAnnealingWarmRestarts(optimizer, restart) if restart else None
    losses: list[float] = []
    while len(losses) < batches:
        for batch in task.train:
            optimizer.zero_grad()
            loss = task.model.training_step(batch, 0)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            if scheduler is not None:
                scheduler.step()
            if len(losses) == explode_at:
                optimizer.param_groups[0]["lr"] *= 1000.0
    return losses[:batches]


@pytest.mark.parametrize("case", CALM)
def test_real_training_is_no_explosion(case: str) -> None:
    watch = LossWatch()
    for loss in losses_of(*CALM[case]):
        watch.note([loss])
        assert not watch.has_exploded, f"a loss of {loss}"


def test_a_rate_that_no_model_stands_is_one() -> None:
    losses = losses_of({}, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}, explode_at=100)
    watch = LossWatch()
    watch.note(losses[:101])
    assert watch.is_calm
    for number, loss in enumerate(losses[101:], start=1):
        watch.note([loss])
        if watch.has_exploded:
            assert number < 40
            return
    raise AssertionError(f"not noticed: {losses[101:]}")


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_strange_from_the_first_batch_on(strange: float) -> None:
    watch = LossWatch()
    watch.note([strange])
    assert not watch.is_calm
    watch.note([strange] * (IN_A_ROW - 2))
    assert not watch.has_exploded
    watch.note([strange])
    assert watch.has_exploded
    watch.forget_explosion()
    assert watch.is_calm


def test_a_bad_batch_now_and_then_is_none() -> None:
    watch = LossWatch()
    for number in range(500):
        watch.note([1000.0 if number % 4 == 3 else 1.0 + 0.1 * (number % 7)])
        assert not watch.has_exploded


def test_a_slow_explosion_is_one() -> None:
    watch = LossWatch()
    watch.note([2.0 * 1.01**number for number in range(300)])
    assert watch.has_exploded


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_neither_the_unit_nor_the_sign_matters(sign: float) -> None:
    for unit in (1e-6, 1.0, 1e6):
        watch = LossWatch()
        watch.note([unit * sign * (1.0 + 0.2 * math.sin(number)) for number in range(200)])
        assert watch.is_calm
        watch.note([unit * 30.0] * IN_A_ROW)
        assert watch.has_exploded


def test_what_lasts_becomes_what_is_usual() -> None:
    watch = LossWatch()
    watch.note([1.0] * 50)
    watch.note([100.0] * (USUAL_AFTER + 50))
    assert watch.is_calm
