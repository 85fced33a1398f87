"""A state that was kept is what an optimizer, or its successor, returns to: to the bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tiny import TinyModel, parameters, train

from hivenb.engine.optimizer.handover import release, take_over
from hivenb.engine.optimizer.optimizer import Optimizer
from hivenb.engine.trust.reliability import RoundReport
from hivenb.strategy.kept_state import KeptState, roll_back, trained_names

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAM = partial(torch.optim.AdamW, lr=0.01)
DECAY = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9)

MODES: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": SGD},
    "adam": {"optimizer": ADAM},
    "offloaded": {"optimizer": ADAM, "offload_optimizer": True},
    "delayed": {
        "optimizer": ADAM,
        "offload_optimizer": True,
        "delay_optimizer_step": True,
        "delay_state_averaging": True,
    },
    "reused": {"optimizer": SGD, "reuse_grad_buffers": True},
    "double": {"optimizer": ADAM, "double": True},
}


@pytest.fixture
def make_optimizer(make_optimizer_in_memory: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    """Without processes."""
    return make_optimizer_in_memory


def made(make: Callable[..., Optimizer], model: TinyModel, **mode: Any) -> Optimizer:
    if mode.pop("double", False):
        model.double()
    factory = mode.pop("optimizer")
    if mode.get("offload_optimizer"):
        return make(optimizer=factory, params=list(model.parameters()), scheduler=DECAY, **mode)
    torch_optimizer = factory(model.parameters())
    return make(optimizer=torch_optimizer, scheduler=DECAY(torch_optimizer), **mode)


def moments(optimizer: Optimizer) -> list[torch.Tensor]:
    return [value.clone() for state in optimizer.opt.state.values() for value in state.values() if value is not None]


def steps(model: TinyModel, optimizer: Optimizer, count: int) -> None:
    for number in range(count):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number), dtype=model.layer.weight.dtype)
        optimizer.zero_grad()
        model.layer(x).square().mean().backward()
        optimizer.step(batch_size=8)
    optimizer.finish_delayed_updates()


@pytest.mark.parametrize("mode", MODES)
def test_what_comes_back_is_what_was_kept(
    make_optimizer: Callable[..., Optimizer], eventually: Callable[..., None], mode: str
) -> None:
    model = TinyModel()
    model.register_buffer("statistic", torch.arange(3.0))
    buffers = dict(model.named_buffers())
    optimizer = made(make_optimizer, model, **MODES[mode])
    kept = KeptState()
    steps(model, optimizer, 3)
    assert kept.keep(optimizer, buffers)
    epoch, was, were = optimizer.local_epoch, parameters(model), moments(optimizer)
    assert kept.epoch == epoch > 0
    steps(model, optimizer, 4)
    buffers["statistic"].mul_(7.0)
    rate = optimizer.opt.param_groups[0]["lr"]
    assert not torch.equal(parameters(model)[0], was[0])

    now = optimizer.local_epoch
    optimizer.rounds._reliability.note("gradients", RoundReport(now, refused=((b"another", "nan"),)))
    roll_back(optimizer, kept, buffers, now + 2)
    eventually(lambda: not optimizer.rounds._reliability.excluded_peers(now + 2))  # nobody's fault
    assert all(map(torch.equal, parameters(model), was))
    assert all(map(torch.equal, moments(optimizer), were))
    assert buffers["statistic"].tolist() == [0.0, 1.0, 2.0]
    assert optimizer.local_epoch == optimizer.tracker.local_progress.epoch == now + 2
    assert optimizer.local_progress.samples_accumulated == 0
    assert optimizer.opt.param_groups[0]["lr"] == pytest.approx(rate * 0.9**2), "the schedule goes on with the epoch"
    steps(model, optimizer, 2)
    assert optimizer.local_epoch > now + 2
    assert not torch.equal(parameters(model)[0], was[0]), "training goes on"
    roll_back(optimizer, kept, buffers, optimizer.local_epoch)
    assert all(map(torch.equal, parameters(model), was)), "once more"


def test_what_is_of_other_parameters_is_forgotten() -> None:
    kept, model = KeptState(), TinyModel()
    kept.epoch, kept.trained = 3, trained_names(model)
    kept.forget_unless(trained_names(model))
    assert kept.epoch == 3
    model.layer.bias.requires_grad_(False)
    kept.forget_unless(trained_names(model))
    assert kept.epoch is None


@pytest.mark.parametrize("mode", ["sgd", "offloaded", "reused"])
def test_gradients_that_no_step_has_taken_are_of_what_is_taken_back(
    make_optimizer: Callable[..., Optimizer], mode: str
) -> None:
    """As in the middle of an accumulation of Lightning's, whose gradients go to the optimizer with its last batch."""
    model = TinyModel()
    optimizer = made(make_optimizer, model, **MODES[mode])
    kept, forgot = KeptState(), []
    steps(model, optimizer, 3)
    assert kept.keep(optimizer, {})
    optimizer.zero_grad()
    (1e9 * model.layer(torch.ones(8, 4))).sum().backward()
    optimizer.on_zero_grad = lambda: forgot.append(True)
    roll_back(optimizer, kept, {}, optimizer.local_epoch)
    assert not any(one.grad is not None and one.grad.any() for one in model.parameters())
    assert forgot == [True], "nor do its samples count"


def test_a_successor_returns_to_what_its_predecessor_has_kept(make_optimizer: Callable[..., Optimizer]) -> None:
    model = TinyModel()
    optimizer = made(make_optimizer, model, **MODES["adam"])
    kept = KeptState()
    steps(model, optimizer, 3)
    assert kept.keep(optimizer, {})
    was = parameters(model)
    steps(model, optimizer, 2)
    successor = take_over(release(optimizer), make_optimizer, offload=True)
    roll_back(successor, kept, {}, successor.local_epoch)
    assert all(map(torch.equal, parameters(model), was))
    assert successor.opt.param_groups[0]["params"][0] is not next(model.parameters())


def test_what_is_not_finite_is_not_kept_and_memory_is_used_again(make_optimizer: Callable[..., Optimizer]) -> None:
    model = TinyModel(optimizer=torch.optim.SGD)
    optimizer = made(make_optimizer, model, **MODES["sgd"])
    kept = KeptState()
    train(model, optimizer, 2, batch_size=8)
    assert kept.keep(optimizer, {})
    epoch, places = kept.epoch, {key: tensor.data_ptr() for key, tensor in kept._tensors.items()}
    was = parameters(model)
    train(model, optimizer, 1, batch_size=8)
    with torch.no_grad():
        model.layer.bias[0] = torch.nan
    assert not kept.keep(optimizer, {})
    assert kept.epoch == epoch
    roll_back(optimizer, kept, {}, optimizer.local_epoch)
    assert all(map(torch.equal, parameters(model), was))
    train(model, optimizer, 1, batch_size=8)
    assert kept.keep(optimizer, {})
    assert {key: tensor.data_ptr() for key, tensor in kept._tensors.items()} == places
    kept.forget()
    assert (kept.epoch, kept._tensors) == (None, {})
