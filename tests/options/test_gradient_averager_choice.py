"""Gradient averagers by name and settings: what they would send, without making them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hivemind.optim.grad_averager import GradientAverager
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager

import hivenb
from hivenb.errors import OptionsError
from hivenb.options.choices import PowerSGD, averager_factory, describe_averager, power_sgd, sent_sizes

SHAPES = ((64, 128), (16, 32, 3, 3), (40,), (4, 5), (), (1000, 1), (0, 5), (2, 3, 200))


class Own(PowerSGDGradientAverager):
    """Which only this peer has."""


@pytest.mark.parametrize("told", [PowerSGD(1), PowerSGD(4), PowerSGD(4, 0.9), PowerSGD(32), PowerSGD(3, 0.0)])
def test_as_many_numbers_are_reckoned_as_an_averager_would_send(swarm: hivenb.Swarm, told: PowerSGD) -> None:
    shapes = [shape for shape in SHAPES if 0 not in shape]  # of an empty one, hivemind makes no averager
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    averager: Any = told.factory()(parameters=parameters, dht=swarm.dht, prefix="reckoned", start=False)
    whole = sum(parameters[index].numel() for index in averager._uncompressed_gradients_indexes)
    rows = [gradient.numel() // matrix.shape[0] for gradient, matrix in zip(averager._ms, averager._qs, strict=True)]
    thin = sum(told.averager_rank * count for count in rows) + sum(matrix.numel() for matrix in averager._qs)
    assert sum(sent_sizes(shapes, told.factory()) or ()) == whole + thin


def test_without_power_sgd_all_is_sent() -> None:
    for factory in (None, GradientAverager, partial(GradientAverager, warn=False)):
        assert sent_sizes(((2, 3), (4,), (0, 5)), factory) == (6, 4, 0)
    assert sent_sizes(((0, 5),), PowerSGD(1).factory()) == (0,)


@pytest.mark.parametrize(
    ("factory", "told"),
    [
        (None, None),
        (GradientAverager, None),
        (partial(PowerSGDGradientAverager, averager_rank=4), PowerSGD(4)),
        (partial(PowerSGDGradientAverager, averager_rank=4, min_compression_ratio=0.5), PowerSGD(4)),
        (partial(PowerSGDGradientAverager, averager_rank=4, min_compression_ratio=0.2), PowerSGD(4, 0.2)),
        (partial(partial(PowerSGDGradientAverager, averager_rank=4), averager_rank=2), PowerSGD(2)),
        (partial(PowerSGDGradientAverager, averager_rank=4, warn=False), None),
        (partial(Own, averager_rank=4), None),
        (lambda **_: None, None),
    ],
)
def test_power_sgd_is_known_by_its_settings(factory: Callable[..., Any] | None, told: PowerSGD | None) -> None:
    assert power_sgd(factory) == told
    if told is not None:
        assert power_sgd(told.factory()) == told


def test_what_was_described_can_be_made_elsewhere() -> None:
    for factory in (None, GradientAverager, PowerSGD(4).factory(), PowerSGD(4, 0.2).factory()):
        assert describe_averager(averager_factory(describe_averager(factory))) == describe_averager(factory)
    with pytest.raises(
        OptionsError, match=r"test_gradient_averager_choice\.Own, which is not hivemind's own: give this"
    ):
        averager_factory(describe_averager(partial(Own, averager_rank=4)))
    with pytest.raises(OptionsError, match="with anything, which is not"):
        averager_factory("anything")
