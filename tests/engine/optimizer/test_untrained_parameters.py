"""What is frozen when training begins is no business of the swarm, but a part of the optimizer's state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from in_memory.real_time import RealTimeDHT
from tiny import MODES
from torch import Tensor, nn

from hivenb.engine.optimizer.checkpoint import find_obstacle
from hivenb.engine.optimizer.handover import give_back, release, take_over
from hivenb.engine.optimizer.optimizer import Optimizer
from hivenb.engine.optimizer.untrained_parameters import UntrainedParameters

Make = Callable[..., Optimizer]


@pytest.fixture
def make_optimizer(make_optimizer_in_memory: Make) -> Make:
    """Without processes."""
    return make_optimizer_in_memory


class Adapted(nn.Module):
    """A base of bytes, of integers, of truths and of numbers, under something that learns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bytes = nn.Parameter(torch.randint(0, 255, (4,), dtype=torch.uint8), requires_grad=False)
        self.adapter = nn.Linear(4, 2)
        self.integers = nn.Parameter(torch.arange(4), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True, True]), requires_grad=False)
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(2, 1)

    def loss(self, batch: int) -> Tensor:
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(batch))
        hidden = self.base(inputs * self.mask + self.integers) + self.bytes.float() / 255
        return self.head(self.adapter(hidden)).pow(2).mean()

    @property
    def groups(self) -> list[dict[str, Any]]:
        adapter = [self.bytes, *self.adapter.parameters(), self.integers]
        return [
            {"params": adapter, "lr": 0.02},
            {"params": [self.mask, *self.base.parameters()]},
            {"params": [*self.head.parameters()]},
        ]


def adam(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, 0.01, weight_decay=0.1)


def plain(batches: int) -> tuple[Adapted, torch.optim.Optimizer]:
    model = Adapted()
    optimizer = adam(model.groups)
    for batch in range(batches):
        optimizer.zero_grad()
        model.loss(batch).backward()
        optimizer.step()
    return model, optimizer


def train(model: Adapted, optimizer: Optimizer, batches: range) -> None:
    for batch in batches:
        if not optimizer.use_local_updates and optimizer.grad_averager.reuse_grad_buffers:
            optimizer.grad_averager.keep_gradients()
        optimizer.zero_grad()
        model.loss(batch).backward()
        optimizer.step(batch_size=8)


def make(make_optimizer: Make, model: Adapted, mode: dict[str, Any]) -> tuple[Optimizer, torch.optim.Optimizer]:
    given = adam(model.groups)
    if mode.get("offload_optimizer"):
        made = make_optimizer(optimizer=adam, params=given.param_groups, **mode)
    else:
        made = make_optimizer(optimizer=given, **mode)
    made.begin()
    return made, given


def assert_alike(model: nn.Module, expected: nn.Module) -> None:
    for (name, got), other in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.allclose(got, other[1], atol=1e-6), name


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "all delays"])
def test_it_trains_as_with_torch_and_has_nothing_of_what_is_frozen(make_optimizer: Make, mode: str) -> None:
    model, (expected, stepped) = Adapted(), plain(6)
    optimizer, given = make(make_optimizer, model, MODES[mode])
    train(model, optimizer, range(6))
    assert_alike(model, expected)
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    for averager in (optimizer.state_averager, optimizer.grad_averager):
        if averager is not None:
            with averager.get_tensors() as averaged:
                assert sum(one.numel() for one in averaged) == trained
    assert model.base.weight.grad is None
    resumed = adam(copy.deepcopy(model).groups)
    resumed.load_state_dict(optimizer.state_dict())  # of plain torch, with all parameters in its groups
    for own, other in zip(resumed.state_dict()["param_groups"], stepped.state_dict()["param_groups"], strict=True):
        assert own["params"] == other["params"]
    assert resumed.state_dict()["state"].keys() == stepped.state_dict()["state"].keys()
    optimizer.shutdown()
    give_back(optimizer, given)
    assert [group["params"] for group in given.param_groups] == [group["params"] for group in model.groups]


@pytest.mark.parametrize("mode", ["synchronous", "offloaded"])
def test_it_goes_on_from_the_state_of_plain_torch(make_optimizer: Make, mode: str) -> None:
    model, stepped = plain(3)
    optimizer, _ = make(make_optimizer, model, MODES[mode])
    optimizer.load_state_dict(stepped.state_dict())
    train(model, optimizer, range(3, 6))
    assert_alike(model, plain(6)[0])


@pytest.mark.parametrize("after", [False, True], ids=["to the device", "to main memory"])
def test_a_successor_leaves_it_out_too(make_optimizer: Make, memory_dht: RealTimeDHT, run_id: str, after: bool) -> None:
    model = Adapted()
    optimizer, given = make(make_optimizer, model, {"offload_optimizer": not after})
    train(model, optimizer, range(3))
    successor = take_over(
        release(optimizer),
        Optimizer,
        offload=after,
        dht=memory_dht,
        run_id=run_id,
        target_batch_size=8,
        delay_state_averaging=False,
    )
    try:
        train(model, successor, range(3, 6))
    finally:
        successor.shutdown()
    give_back(successor, given)
    assert_alike(model, plain(6)[0])
    assert [group["params"] for group in given.param_groups] == [group["params"] for group in model.groups]


def test_what_is_unfrozen_meanwhile_is_known() -> None:
    model = Adapted()
    frozen = UntrainedParameters.among(model.groups)
    assert frozen.unfrozen() == []
    model.adapter.requires_grad_(False)  # for a while: it is averaged, and has no gradient
    assert frozen.unfrozen() == []
    model.base.requires_grad_(True)
    assert [id(one) for one in frozen.unfrozen()] == [id(one) for one in model.base.parameters()]


def test_a_state_of_another_model_is_left_to_torch_to_refuse() -> None:
    frozen = UntrainedParameters.among(Adapted().groups)
    state = torch.optim.SGD([nn.Parameter(torch.zeros(1))]).state_dict()
    assert frozen.of_trained(state) == state


def test_where_all_is_frozen_there_is_nothing_to_train() -> None:
    model = Adapted().requires_grad_(False)
    assert "nothing to train" in str(find_obstacle(adam(model.groups), model.modules(), False))
    assert find_obstacle(adam(Adapted().groups), model.modules(), True) is None
