"""Scripts of fine-tuning: a base that the optimizer is given and that is frozen, for ever or for a while."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tiny import QUIET, TinyModel, loader, own_run, trainer
from torch import Tensor, nn

import hivenb
from hivenb.figures.predicted_traffic import tensor_shapes
from hivenb.strategy import HivemindStrategy
from hivenb.strategy.checks import shared_bytes
from hivenb.swarm.agreement.model_record import describe_parameters


class FineTuned(TinyModel):
    """Bytes and numbers that are frozen, under a layer that learns."""

    def __init__(self) -> None:
        super().__init__(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
        torch.manual_seed(0)
        self.bytes = nn.Parameter(torch.randint(0, 255, (2, 4), dtype=torch.uint8), requires_grad=False)
        self.base = nn.Linear(4, 4).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.base(batch[0])
        return nn.functional.mse_loss(self.layer(hidden) + hidden @ self.bytes.float().T / 255, batch[1])


class Unfreezing(FineTuned):
    """Unfreezes the base in the middle."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.base.requires_grad_(True)


class UnfreezingAsAdvised(Unfreezing):
    """Has it frozen only when training begins."""

    def __init__(self) -> None:
        super().__init__()
        self.base.requires_grad_(True)

    def on_train_start(self) -> None:
        self.base.requires_grad_(False)


def fit(model: TinyModel, strategy: Any = "auto") -> TinyModel:
    Trainer(**{**QUIET, "strategy": strategy, "max_epochs": 1}).fit(model, loader(64, 8))
    return model


@pytest.mark.parametrize("options", [{}, {"offload_optimizer": True}], ids=["synchronous", "offloaded"])
@pytest.mark.parametrize("kind", [FineTuned, UnfreezingAsAdvised])
def test_it_trains_as_with_plain_lightning(swarm: hivenb.Swarm, kind: type[TinyModel], options: dict[str, Any]) -> None:
    got = fit(kind(), HivemindStrategy(8, dht=swarm.dht, **own_run(), **options))
    before, expected = kind(), fit(kind())
    assert torch.equal(got.base.weight, before.base.weight) == (kind is FineTuned)
    for (name, one), other in zip(got.named_parameters(), expected.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-5), name


@pytest.mark.parametrize("resumes", ["plain", "ours"])
def test_a_checkpoint_goes_on_in_the_other_one(swarm: hivenb.Swarm, tmp_path: Any, resumes: str) -> None:
    def on(is_ours: bool, **kwargs: Any) -> Trainer:
        own = HivemindStrategy(8, dht=swarm.dht, **own_run()) if is_ours else "auto"
        return Trainer(**{**QUIET, "strategy": own, **kwargs})

    first, path = on(resumes == "plain", max_epochs=1), tmp_path / "last.ckpt"
    first.fit(FineTuned(), loader(64, 8))
    first.save_checkpoint(path)
    got, expected = FineTuned(), FineTuned()
    on(resumes == "ours", max_epochs=2).fit(got, loader(64, 8), ckpt_path=path, weights_only=False)
    on(False, max_epochs=2).fit(expected, loader(64, 8))
    for (name, one), other in zip(got.named_parameters(), expected.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-5), name


class FrozenFirst(FineTuned):
    """Gives its optimizer what is frozen before what is trained, and the same optimizer each time."""

    def __init__(self) -> None:
        super().__init__()
        parameters = sorted(self.parameters(), key=lambda one: one.requires_grad)
        self.given = torch.optim.AdamW(parameters, lr=0.01)

    def configure_optimizers(self) -> Any:
        return self.given


def test_the_optimizer_is_given_back_once_whatever_else_its_trainer_does(swarm: hivenb.Swarm) -> None:
    model = FrozenFirst()
    before = list(model.given.param_groups[0]["params"])
    training = trainer(HivemindStrategy(32, dht=swarm.dht, matchmaking_time=0.5, **own_run()), max_epochs=1)
    training.fit(model, loader(64, 8))
    for _ in range(2):
        training.validate(model, loader(), verbose=False)
    assert [id(one) for one in model.given.param_groups[0]["params"]] == [id(one) for one in before]
    assert len(model.given.state_dict()["param_groups"][0]["params"]) == len(before)


def test_an_unfrozen_base_is_refused_with_what_to_do(swarm: hivenb.Swarm) -> None:
    with pytest.raises(MisconfigurationException, match=r"base\.weight was frozen .* in on_train_start"):
        fit(Unfreezing(), HivemindStrategy(8, dht=swarm.dht, **own_run()))


def test_a_group_that_is_added_is_refused_with_what_to_do(swarm: hivenb.Swarm) -> None:
    class Adding(FineTuned):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.trainer.optimizers[0].add_param_group({"params": [*self.base.parameters()]})

    with pytest.raises(MisconfigurationException, match=r"from the beginning, with requires_grad=True"):
        trainer(HivemindStrategy(8, dht=swarm.dht, **own_run()), max_epochs=1).fit(Adding(), loader(8, 8))


def test_what_is_told_before_is_of_what_is_trained() -> None:
    model = FineTuned()
    optimizer = model.configure_optimizers()
    assert [one[:2] for one in describe_parameters(model, optimizer)] == [
        ("layer.weight", (2, 4)),
        ("layer.bias", (2,)),
    ]
    assert tensor_shapes(model) == ((2, 4), (2,))
    assert shared_bytes(optimizer, hivenb.Options(target_batch_size=8)) == 2 * 4 * 10
