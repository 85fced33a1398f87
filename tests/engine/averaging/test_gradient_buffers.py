"""Gradients are weighed by samples, summed up, and handed to an averager, and each epoch begins with nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hivemind.optim import grad_averager
from in_memory.real_time import RealTimeDHT
from torch import Tensor

from hivenb.engine.averaging.gradient_averager import GradientAverager

Make = Callable[..., Any]

#: A gradient of a batch, and samples in it.
BATCHES = [(Tensor([1.0, 2.0, 3.0]), 4), (Tensor([5.0, 0.0, 1.0]), 12)]
MEAN = Tensor([4.0, 0.5, 1.5])


def accumulate(averager: Any, gradient: Tensor, samples: int) -> None:
    (parameter,) = averager.parameters
    if averager.reuse_grad_buffers:
        parameter.grad = next(averager._grads_from_parameters()) + gradient * samples
    else:
        parameter.grad = gradient.clone()
    averager.accumulate_grads_(samples)


def loaded(averager: Any) -> Tensor:
    averager.load_accumulators_into_averager_()
    with averager.get_tensors() as (tensor,):
        return tensor.clone()


@pytest.fixture(params=[False, True], ids=["buffers", "reused"])
def averager(request: pytest.FixtureRequest, memory_dht: RealTimeDHT, make_averager: Make) -> Any:
    made = make_averager(memory_dht, reuse_grad_buffers=request.param)
    made.samples_of_weight_one = 1
    return made


def test_batches_count_by_their_samples(averager: Any) -> None:
    for gradient, samples in BATCHES:
        accumulate(averager, gradient, samples)
    assert torch.allclose(loaded(averager), MEAN)
    assert torch.allclose(averager.mean_gradients()[0], MEAN)


def test_what_the_model_was_left_with_is_in_no_sum(memory_dht: RealTimeDHT, make_averager: Make) -> None:
    def with_rest(parameters: Any, **kwargs: Any) -> GradientAverager:
        parameters[0].grad = torch.full((3,), 7.0)
        return GradientAverager(parameters, **kwargs)

    averager = make_averager(memory_dht, kind=with_rest, reuse_grad_buffers=True)
    averager.sum_in_units_of(1)
    for gradient, samples in BATCHES:
        accumulate(averager, gradient, samples)
    assert torch.allclose(loaded(averager), MEAN)


def test_what_is_handed_over_keeps_its_weight_whatever_the_unit_is_then(
    memory_dht: RealTimeDHT, make_averager: Make
) -> None:
    successor = make_averager(memory_dht, reuse_grad_buffers=True)
    successor.set_mean_gradients([torch.ones(3)], 40)
    for unit in (4, 8, 8):  # by the samples of a batch, and how many of them make a step
        successor.sum_in_units_of(unit)
        successor.parameters[0].grad += 8 / unit
        successor.accumulate_grads_(8)
        assert torch.allclose(loaded(successor), torch.ones(3))


def test_nothing_of_an_epoch_gets_into_the_next(averager: Any) -> None:
    accumulate(averager, torch.full((3,), math.nan), 4)
    averager.reset_accumulated_grads_()
    if averager.reuse_grad_buffers:  # a value that is none cannot be overwritten by the sum of the next batch
        assert torch.equal(averager.parameters[0].grad, torch.zeros(3))
    for gradient, samples in reversed(BATCHES):
        accumulate(averager, gradient, samples)
    assert torch.allclose(loaded(averager), MEAN)


def test_without_samples_the_mean_is_zero(averager: Any) -> None:
    accumulate(averager, torch.full((3,), math.nan), 4)
    loaded(averager)
    averager.reset_accumulated_grads_()
    assert averager.mean_gradients() is None
    assert torch.equal(loaded(averager), torch.zeros(3))


def test_what_was_handed_over_is_one_batch_of_the_epoch(averager: Any) -> None:
    averager.set_mean_gradients([BATCHES[0][0]], BATCHES[0][1])
    accumulate(averager, *BATCHES[1])
    assert torch.allclose(loaded(averager), MEAN)


def test_what_a_class_of_the_users_own_does_to_the_sums_is_sent(averager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise for privacy, say; also where somebody has looked at the means before."""
    seen: list[Tensor] = []
    sent: list[Tensor] = []

    def step(self: Any, *_: Any, **__: Any) -> None:
        for total in self._grad_accumulators():
            total.mul_(2)
        sent.append(loaded(self))

    monkeypatch.setattr(grad_averager.GradientAverager, "step", step)
    averager.on_own_gradients = lambda means, has_gradient: seen.extend(one.clone() for one in means)
    for gradient, samples in BATCHES:
        accumulate(averager, gradient, samples)
    averager.step(wait=False)
    assert torch.allclose(seen[0], MEAN)
    assert torch.allclose(sent[0], 2 * MEAN)


def test_the_mean_is_loaded_once(averager: Any) -> None:
    accumulate(averager, *BATCHES[0])
    expected = loaded(averager)
    with averager.get_tensors() as (tensor,):
        tensor.mul_(2)  # as a round of averaging would change it
    assert torch.equal(loaded(averager), 2 * expected)
    accumulate(averager, *BATCHES[1])
    assert torch.allclose(loaded(averager), MEAN)


def test_gradients_of_few_rows_are_summed_up(memory_dht: RealTimeDHT, make_averager: Make) -> None:
    averager = make_averager(memory_dht)
    for _ in range(2):
        for gradient, samples in BATCHES:
            averager.parameters[0].grad = gradient.to_sparse()
            averager.accumulate_grads_(samples)
        assert torch.allclose(loaded(averager), MEAN)
        averager.reset_accumulated_grads_()
