"""A parameter that no batch of an epoch has used has no gradient in its step, in whatever way a peer trains."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from in_memory.real_time import RealTimeDHT
from tiny import MODES
from torch import Tensor, nn

from hivenb.engine.optimizer.handover import release, take_over
from hivenb.engine.optimizer.optimizer import Optimizer

Make = Callable[..., Optimizer]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.5),
}
EPOCHS = 5


@pytest.fixture
def make_optimizer(make_optimizer_in_memory: Make) -> Make:
    """Without processes."""
    return make_optimizer_in_memory


class Branches(nn.Module):
    """One part that is used always, one in every other epoch and one never; with gradients that are always the same."""

    def __init__(self) -> None:
        super().__init__()
        for number, name in enumerate(("always", "sometimes", "never")):
            self.register_parameter(name, nn.Parameter(torch.arange(1.0, 4.0) * (number + 1)))

    def loss(self, epoch: int) -> Tensor:
        used = self.always if epoch % 2 else self.always + self.sometimes
        return (used * torch.tensor([1.0, -2.0, 0.5])).sum()


def plain(make_optimizer: Callable[..., torch.optim.Optimizer], epochs: int = EPOCHS) -> Branches:
    """What torch makes of it."""
    model = Branches()
    optimizer = make_optimizer(model.parameters())
    for epoch in range(epochs):
        optimizer.zero_grad()
        model.loss(epoch).backward()
        optimizer.step()
    return model


def train(model: Branches, optimizer: Optimizer, epochs: range = range(EPOCHS)) -> None:
    for epoch in epochs:
        if not optimizer.use_local_updates and optimizer.grad_averager.reuse_grad_buffers:
            optimizer.grad_averager.keep_gradients()
        optimizer.zero_grad()
        model.loss(epoch).backward()
        optimizer.step(batch_size=8)
    optimizer.finish_delayed_updates()


def make(
    make_optimizer: Make, model: Branches, kind: Callable[..., Any], mode: dict[str, Any], **more: Any
) -> Optimizer:
    if mode.get("offload_optimizer"):
        made = make_optimizer(optimizer=kind, params=list(model.parameters()), **mode, **more)
    else:
        made = make_optimizer(optimizer=kind(model.parameters()), **mode, **more)
    made.begin()
    return made


def assert_alike(got: nn.Module, expected: nn.Module) -> None:
    for (name, one), other in zip(got.named_parameters(), expected.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6), name


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("mode", MODES)
def test_it_is_as_torch_leaves_it(make_optimizer: Make, mode: str, kind: str) -> None:
    model = Branches()
    train(model, make(make_optimizer, model, OPTIMIZERS[kind], MODES[mode]))
    assert torch.equal(model.never, Branches().never)
    assert_alike(model, plain(OPTIMIZERS[kind]))


@pytest.mark.parametrize("mode", ["synchronous", "offloaded", "reused"])
def test_hooks_of_the_step_see_none(make_optimizer: Make, mode: str) -> None:
    model, seen = Branches(), []

    def kind(parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(parameters)
        made.register_step_pre_hook(
            lambda stepping, *_: seen.append([one.grad is None for one in stepping.param_groups[0]["params"]])
        )
        return made

    train(model, make(make_optimizer, model, kind, MODES[mode]), range(2))
    assert seen == [[False, False, True], [False, True, True]], "and none of them is called for the state to be made"


@pytest.mark.parametrize("mode", ["synchronous", "offloaded", "reused"])
def test_a_successor_knows_what_was_used(make_optimizer: Make, memory_dht: RealTimeDHT, run_id: str, mode: str) -> None:
    model, kind = Branches(), OPTIMIZERS["AdamW"]
    optimizer = make(make_optimizer, model, kind, MODES[mode], target_batch_size=16)
    optimizer.zero_grad()
    model.loss(0).backward()
    optimizer.step(batch_size=8)
    settings = {key: value for key, value in MODES[mode].items() if key != "offload_optimizer"}
    offload = mode == "offloaded"
    settings |= {"dht": memory_dht, "run_id": run_id, "target_batch_size": 16, "delay_state_averaging": False}
    successor = take_over(release(optimizer), Optimizer, offload=offload, **settings)
    try:
        successor.zero_grad()
        model.loss(0).backward()
        successor.step(batch_size=8)
        assert successor.local_epoch == 1
        assert_alike(model, plain(kind, 1))
    finally:
        successor.shutdown()


@pytest.mark.parametrize("mode", ["synchronous", "offloaded"])
def test_plain_torch_and_the_swarm_go_on_from_each_others_state(make_optimizer: Make, mode: str) -> None:
    """Torch has no state of what it has never stepped; peers exchange one that is as good as none."""
    before, kind = plain(OPTIMIZERS["AdamW"], 2), OPTIMIZERS["AdamW"]
    stepped = kind(before.parameters())
    stepped.zero_grad()
    before.loss(0).backward()
    stepped.step()
    model = copy.deepcopy(before)
    optimizer = make(make_optimizer, model, kind, MODES[mode])
    optimizer.load_state_dict(stepped.state_dict())
    steps = [state["step"].item() for state in optimizer.opt.state.values()]
    assert steps == [1, 1, 0]
    assert [bool(state["exp_avg"].any()) for state in optimizer.opt.state.values()] == [True, True, False]
    train(model, optimizer, range(1, 4))
    for epoch in range(1, 4):
        stepped.zero_grad()
        before.loss(epoch).backward()
        stepped.step()
    assert_alike(model, before)
    resumed = kind(model.parameters())
    resumed.load_state_dict(optimizer.state_dict())
    for one, own in ((before, stepped), (model, resumed)):
        own.zero_grad()
        (one.never.sum() + one.loss(0)).backward()  # its first step
        own.step()
    assert_alike(model, before)


def test_peers_of_which_one_has_used_it_make_the_same_step(
    make_optimizer: Make, joining_memory_dht: RealTimeDHT, eventually: Any
) -> None:
    """The mean is over the samples of both, of which one has zeros."""
    models = [Branches(), Branches()]
    options = {"target_batch_size": 16, "matchmaking_time": 5.0}
    optimizers = [
        make(make_optimizer, model, OPTIMIZERS["AdamW"], {}, **options, **more)
        for model, more in zip(models, ({}, {"dht": joining_memory_dht}), strict=True)
    ]
    eventually(lambda: all(one.tracker.global_progress.num_peers == 2 for one in optimizers))
    for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        optimizer.zero_grad()
        model.loss(number).backward()
        optimizer.grad_averager.accumulate_grads_(8)
    for optimizer in optimizers:
        optimizer.rounds.be_ready_for_gradients()
        optimizer.grad_averager.step(control=optimizer.scheduled_grads, wait=False)
    for optimizer in optimizers:
        optimizer._average_gradients_and_load_into_optimizer(optimizer.scheduled_grads)
        assert optimizer.rounds.last.group_size == 2
        optimizer.opt.step()
    expected = Branches()
    torch_optimizer = OPTIMIZERS["AdamW"](expected.parameters())
    ((expected.loss(0) + expected.loss(1)) / 2).backward()
    torch_optimizer.step()
    for model in models:
        assert_alike(model, expected)
