"""No step of the optimizer is made with what is not finite, and no peer sends such a gradient of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from in_memory.real_time import RealTimeDHT
from tiny import DELAYS, TinyModel, parameters, train

from hivenb.engine.averaging.gradient_averager import GradientAverager
from hivenb.engine.optimizer.optimizer import Optimizer
from hivenb.engine.trust.aggregation import NEXT_TO_NOTHING

Make = Callable[..., Optimizer]

MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "offloaded": {"offload_optimizer": True},
    "all delays": DELAYS,
    "reused": {"reuse_grad_buffers": True},
}


@pytest.fixture
def make_optimizer(make_optimizer_in_memory: Make) -> Make:
    """Without processes."""
    return make_optimizer_in_memory


@pytest.mark.parametrize("mode", MODES)
def test_an_epoch_whose_gradients_sum_up_to_infinity_ends_without_a_step(
    make_optimizer: Make, mode: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("hivenb"), "propagate", True)
    model = TinyModel()
    if "offload_optimizer" in MODES[mode]:
        chosen = {"optimizer": partial(torch.optim.AdamW, lr=0.1), "params": list(model.parameters())}
    else:
        chosen = {"optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}
    optimizer = make_optimizer(**MODES[mode], **chosen, target_batch_size=16)
    optimizer.begin()
    before = parameters(model)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 3e38)
            if mode == "reused":
                parameter.grad.fill_(torch.inf if optimizer.local_progress.samples_accumulated else 3e38)
                monkeypatch.setattr(optimizer, "_is_to_be_skipped", lambda scaler, gradients: False)
        optimizer.step(batch_size=8)
    optimizer.finish_delayed_updates()
    assert optimizer.local_epoch == 1
    for expected, got in zip(before, parameters(model), strict=True):
        assert torch.equal(expected, got)
    assert "Epoch 0 ends without a step of the optimizer: nan or inf in 2 of 2 gradients" in caplog.text
    train(model, optimizer, 4, batch_size=8)
    optimizer.finish_delayed_updates()
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    assert not torch.equal(before[0], parameters(model)[0])


def test_a_sum_that_is_infinite_is_sent_as_zeros_that_count_for_nothing(
    memory_dht: RealTimeDHT, make_averager: Callable[..., GradientAverager]
) -> None:
    averager = make_averager(memory_dht)
    for _ in range(3):
        averager.parameters[0].grad = torch.full((3,), 3e38)
        averager.accumulate_grads_(1)
    control = averager.step(gather=0, timeout=5.0, wait=False)
    try:
        assert control.weight == NEXT_TO_NOTHING
        with averager.get_tensors() as (gradient,):
            assert gradient.tolist() == [0.0] * 3
    finally:
        control.cancel()
