"""A module that changes its parameters itself has them as with torch, wherever the optimizer is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from in_memory.real_time import RealTimeDHT
from tiny import DELAYS, MODES
from torch import Tensor, nn

from hivenb.engine.optimizer.handover import give_back, release, take_over
from hivenb.engine.optimizer.optimizer import Optimizer

Make = Callable[..., Optimizer]
BATCHES = 30
ALL_MODES = {
    **MODES,
    "state in the background": {"delay_state_averaging": True},
    "offloaded, state in the background": {"offload_optimizer": True, "delay_state_averaging": True},
    "step in the background": {name: True for name in DELAYS if name != "delay_grad_averaging"},
}


@pytest.fixture
def make_optimizer(make_optimizer_in_memory: Make) -> Make:
    """Without processes."""
    return make_optimizer_in_memory


class Changing(nn.Module):
    """A network that learns, one that follows it, weights that are clamped, pruned, held to a norm and set by hand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.online = nn.Linear(4, 2)
        self.target = copy.deepcopy(self.online)
        self.clamped, self.pruned = (nn.Parameter(torch.full((4,), 0.05)) for _ in range(2))
        self.copied = nn.Parameter(torch.zeros(2))
        self.embedding = nn.Embedding(3, 2, max_norm=0.5)

    def loss(self, batch: int) -> Tensor:
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(batch))
        learned = (self.online(inputs) - 3).pow(2).mean() - self.embedding(torch.tensor([0, 1])).sum()
        return learned - (inputs.abs() * (self.clamped + self.pruned)).mean()

    @torch.no_grad()
    def change(self, batch: int) -> None:
        """What it does to itself after a batch."""
        for own, followed in zip(self.target.parameters(), self.online.parameters(), strict=True):
            own.lerp_(followed, 0.2)
        self.clamped.data.clamp_(-0.1, 0.1)
        self.pruned.data[:2] = 0.0
        if batch % 10 == 9:
            self.copied.data.copy_(self.online.bias)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 0.03)


def plain() -> Changing:
    model = Changing()
    optimizer = adam(model.parameters())
    for batch in range(BATCHES):
        optimizer.zero_grad()
        model.loss(batch).backward()
        optimizer.step()
        model.change(batch)
    return model


def train(model: Changing, optimizer: Optimizer, batches: range = range(BATCHES)) -> None:
    for batch in batches:
        optimizer.zero_grad()
        model.loss(batch).backward()
        optimizer.step(batch_size=8)
        model.change(batch)


def make(make_optimizer: Make, model: Changing, mode: dict[str, Any]) -> Optimizer:
    if mode.get("offload_optimizer"):
        made = make_optimizer(optimizer=adam, params=list(model.parameters()), **mode)
    else:
        made = make_optimizer(optimizer=adam(model.parameters()), **mode)
    made.begin()
    return made


@pytest.mark.parametrize("mode", ALL_MODES)
def test_it_is_as_with_torch(make_optimizer: Make, mode: str) -> None:
    model, expected = Changing(), plain()
    optimizer = make(make_optimizer, model, ALL_MODES[mode])
    train(model, optimizer)
    late = 0.1 if ALL_MODES[mode].get("delay_optimizer_step") else 1e-5  # a step arrives a batch later, or two
    for (name, got), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert (got - other).abs().max() <= late, name
    assert model.pruned[:2].tolist() == [0.0, 0.0]
    assert model.clamped.abs().max() <= 0.1
    optimizer.finish_delayed_updates()
    assert (model.online.bias - model.target.bias).abs().max() < 0.2
    assert model.embedding.weight[:2].norm(dim=1).max() < 0.59  # two steps of the optimizer away, at most


@pytest.mark.parametrize("after", [False, True], ids=["to the device", "to main memory"])
def test_a_successor_has_it(make_optimizer: Make, memory_dht: RealTimeDHT, run_id: str, after: bool) -> None:
    model = Changing()
    optimizer = make(make_optimizer, model, {"offload_optimizer": not after, "delay_state_averaging": True})
    train(model, optimizer, range(3))
    settings = {"dht": memory_dht, "run_id": run_id, "target_batch_size": 8, "delay_state_averaging": True}
    before = copy.deepcopy(model.state_dict())
    successor = take_over(release(optimizer), Optimizer, offload=after, **settings)
    try:
        assert all(map(torch.equal, model.state_dict().values(), before.values()))
        train(model, successor, range(3, BATCHES))
    finally:
        successor.shutdown()
    for got, other in zip(model.parameters(), plain().parameters(), strict=True):
        assert torch.allclose(got, other, atol=1e-5)


def test_an_optimizer_that_is_given_back_has_it(make_optimizer: Make, memory_dht: RealTimeDHT, run_id: str) -> None:
    model = Changing()
    given = adam(model.parameters())
    optimizer = make_optimizer(optimizer=given)
    optimizer.begin()
    successor = take_over(
        release(optimizer), Optimizer, offload=True, dht=memory_dht, run_id=run_id, target_batch_size=8
    )
    train(model, successor, range(BATCHES))
    model.copied.data.fill_(7.0)
    successor.shutdown()
    give_back(successor, given)
    assert given.param_groups[0]["params"][0] is model.clamped
    assert model.copied.tolist() == [7.0, 7.0]
