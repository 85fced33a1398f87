"""Every optimizer of torch's, driven by hivemind: the same parameters as in plain Lightning, or an error that says why.

Each batch is as large as the swarm's target, so each swarm epoch is one plain step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import hivemind
import pytest
import torch
from lightning import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tiny import DELAYS, QUIET, TinyModel, loader, own_run, parameters, trainer
from torch import nn, optim

import hivenb
from hivenb.strategy import HivemindStrategy

MODES: dict[str, dict[str, Any]] = {"synchronous": {}, "offloaded": {"offload_optimizer": True}}
Make = Callable[["Layers"], optim.Optimizer]

#: What cannot be driven, and a word of the reason.
REFUSED = {"LBFGS": "closure", "SparseAdam": "sparse"}
CLASSES = [
    name
    for name, kind in vars(optim).items()
    if isinstance(kind, type) and issubclass(kind, optim.Optimizer) and name not in ("Optimizer", *REFUSED)
]


class Layers(TinyModel):
    """Two linear layers, and an optimizer that is made from the model.

    :param make: makes it
    """

    def __init__(self, make: Make):
        super().__init__()
        self.layer: Any = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self._make = make

    def configure_optimizers(self) -> Any:
        return self._make(self)


@pytest.fixture
def dht(swarm: hivenb.Swarm) -> hivemind.DHT:
    return swarm.dht


def fit(model: Layers, dht: hivemind.DHT, **kwargs: Any) -> HivemindStrategy:
    strategy = HivemindStrategy(16, dht=dht, matchmaking_time=0.5, averaging_timeout=20.0, **own_run(), **kwargs)
    trainer(strategy, max_epochs=2).fit(model, loader(64, 16))
    return strategy


def assert_same_as_plain_lightning(dht: hivemind.DHT, make: Make, **kwargs: Any) -> HivemindStrategy:
    model, plain = Layers(make), Layers(make)
    before = parameters(model)
    strategy = fit(model, dht, **kwargs)
    Trainer(**QUIET, max_epochs=2).fit(plain, loader(64, 16))
    assert strategy.hivemind_epoch == 8
    for old, one, other in zip(before, parameters(model), parameters(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        assert torch.equal(old, one) == torch.equal(old, other)
    return strategy


def two_groups(name: str) -> Make:
    """Two groups of parameters, each with a rate and, where the class knows it, a weight decay of its own."""
    kind = getattr(optim, name)

    def make(model: Layers) -> optim.Optimizer:
        first, second = model.layer
        matrices_only = kind is getattr(optim, "Muon", None)
        groups: list[dict[str, Any]] = [
            {"params": [first.weight] if matrices_only else [first.weight, second.weight], "lr": 0.02},
            {"params": [second.weight] if matrices_only else [first.bias, second.bias], "lr": 0.05},
        ]
        if "weight_decay" in inspect.signature(kind).parameters:
            groups[0]["weight_decay"], groups[1]["weight_decay"] = 0.1, 0.0
        return kind(groups, lr=0.03)

    return make


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CLASSES)
def test_every_class_with_two_groups_does_what_plain_lightning_does(dht: hivemind.DHT, name: str, mode: str) -> None:
    strategy = assert_same_as_plain_lightning(dht, two_groups(name), **MODES[mode])
    assert strategy.optimizer is not None
    assert type(strategy.optimizer.opt) is getattr(optim, name)
    assert [group["lr"] for group in strategy.optimizer.opt.param_groups] == [0.02, 0.05]


VARIANTS: dict[str, Make] = {
    "momentum": lambda m: optim.SGD(m.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    "largest moments, backwards": lambda m: optim.AdamW(m.parameters(), lr=0.01, amsgrad=True, maximize=True),
    "fused": lambda m: optim.AdamW(m.parameters(), lr=0.05, fused=True),
    "one call for all tensors": lambda m: optim.Adam(m.parameters(), lr=0.05, foreach=True),
    "rate in a tensor": lambda m: optim.AdamW(m.parameters(), lr=torch.tensor(0.05)),
    "parameters with names": lambda m: optim.Adam(m.named_parameters(), lr=0.05),
    "decay apart from the gradient": lambda m: optim.NAdam(
        m.parameters(), lr=0.05, weight_decay=0.1, decoupled_weight_decay=True
    ),
    "centered": lambda m: optim.RMSprop(m.parameters(), lr=0.01, centered=True, momentum=0.9, weight_decay=0.1),
    "sums that begin above zero": lambda m: optim.Adagrad(
        m.parameters(), lr=0.05, lr_decay=0.1, initial_accumulator_value=0.5
    ),
    "a rate that falls by itself": lambda m: optim.ASGD(m.parameters(), lr=0.05, lambd=0.1, t0=2),
    "some of the parameters": lambda m: optim.Adam(m.layer[1].parameters(), lr=0.05),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_arguments_have_the_effect_that_they_have_in_plain_lightning(
    dht: hivemind.DHT, variant: str, mode: str
) -> None:
    assert_same_as_plain_lightning(dht, VARIANTS[variant], **MODES[mode])


class Bounded(optim.SGD):
    """An optimizer of somebody's own, with arguments that its groups do not know of."""

    def __init__(self, params: Any, lr: float, bound: float, *, factor: float = 1.0):
        super().__init__(params, lr=lr)
        self.bound, self.factor = bound, factor

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.clamp_(-self.bound, self.bound).mul_(self.factor)
        return super().step(closure)


class Forgetful(Bounded):
    """One that does not tell what it was created with."""

    def __init__(self, params: Any, limit: float):
        super().__init__(params, lr=0.1, bound=limit)


class TestOfSomebodysOwn:
    def test_its_arguments_survive_offloading(self, dht: hivemind.DHT) -> None:
        before = Layers(lambda m: Bounded(m.parameters(), 0.1, 0.2, factor=0.5))
        start = parameters(before)
        strategy = fit(before, dht, offload_optimizer=True)
        opt: Any = strategy.optimizer and strategy.optimizer.opt
        assert (type(opt), opt.bound, opt.factor) == (Bounded, 0.2, 0.5)
        moved = max(float((new - old).abs().max()) for old, new in zip(start, parameters(before), strict=True))
        assert 0 < moved <= 8 * 0.1 * 0.2 * 0.5 + 1e-6

    def test_one_that_cannot_be_created_anew_is_an_error_that_names_the_argument(self, dht: hivemind.DHT) -> None:
        make: Make = lambda m: Forgetful(m.parameters(), 0.2)  # noqa: E731
        with pytest.raises(MisconfigurationException, match=r"offload_optimizer=True.*Forgetful.*limit"):
            fit(Layers(make), dht, offload_optimizer=True)
        assert fit(Layers(make), dht).hivemind_epoch == 8, "nothing is created anew without offloading"

    @pytest.mark.parametrize("mode", MODES)
    def test_what_else_is_in_a_group_is_kept(self, dht: hivemind.DHT, mode: str) -> None:
        def make(model: Layers) -> optim.Optimizer:
            first, second = model.layer
            return optim.Adam(
                [{"params": first.parameters(), "name": "body"}, {"params": second.parameters(), "name": "head"}]
            )

        strategy = fit(Layers(make), dht, **MODES[mode])
        assert strategy.optimizer is not None
        assert [group["name"] for group in strategy.optimizer.opt.param_groups] == ["body", "head"]

    @pytest.mark.parametrize("mode", MODES)
    def test_what_is_called_around_its_steps_is_called(self, dht: hivemind.DHT, mode: str) -> None:
        calls: list[str] = []

        def make(model: Layers) -> optim.Optimizer:
            made = optim.SGD(model.parameters(), lr=0.1)
            made.register_step_pre_hook(lambda *args: calls.append("before"))
            made.register_step_post_hook(lambda *args: calls.append("after"))
            return made

        fit(Layers(make), dht, **MODES[mode])
        assert calls[-16:] == ["before", "after"] * 8


FROZEN_MODES = {**MODES, "reused gradient buffers": {"reuse_grad_buffers": True}}


class TestFrozenParameters:
    @staticmethod
    def make(kind: Any) -> Make:
        def make(model: Layers) -> optim.Optimizer:
            model.layer[0].requires_grad_(False)
            return kind(model.parameters(), lr=0.05, weight_decay=0.5)

        return make

    @pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW])
    @pytest.mark.parametrize("mode", FROZEN_MODES)
    def test_are_not_decayed(self, dht: hivemind.DHT, kind: Any, mode: str) -> None:
        assert_same_as_plain_lightning(dht, self.make(kind), **FROZEN_MODES[mode])

    def test_are_not_decayed_in_the_background(self, dht: hivemind.DHT) -> None:
        model = Layers(self.make(optim.AdamW))
        before = parameters(model.layer[0])
        fit(model, dht, **DELAYS)
        assert all(torch.equal(one, other) for one, other in zip(before, parameters(model.layer[0]), strict=True))


class Words(Layers):
    """With an embedding whose gradients are sparse."""

    def __init__(self, make: Make):
        super().__init__(make)
        self.words = nn.Embedding(4, 2, sparse=True)
        with torch.no_grad():
            self.words.weight.fill_(0.5)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + self.words(torch.arange(batch_idx + 1) % 3).square().mean()


class TestRefused:
    def make(self, name: str) -> Make:
        # LBFGS takes no groups
        return lambda m: getattr(optim, name)(m.words.parameters() if name == "SparseAdam" else m.parameters(), lr=0.1)

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("name", REFUSED)
    def test_an_optimizer_that_needs_what_peers_cannot_give_says_so(
        self, dht: hivemind.DHT, name: str, mode: str
    ) -> None:
        with pytest.raises(MisconfigurationException, match=f"{name}.*{REFUSED[name]}.*Adam"):
            fit(Words(self.make(name)), dht, **MODES[mode])

    def test_sparse_gradients_are_refused_where_they_cannot_be_replaced(self, dht: hivemind.DHT) -> None:
        make: Make = lambda m: optim.SGD(m.parameters(), lr=0.1)  # noqa: E731
        with pytest.raises(MisconfigurationException, match="sparse=False"):
            fit(Words(make), dht)
        model, plain = Words(make), Words(make)
        fit(model, dht, offload_optimizer=True)
        Trainer(**QUIET, max_epochs=2).fit(plain, loader(64, 16))
        for one, other in zip(parameters(model), parameters(plain), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
