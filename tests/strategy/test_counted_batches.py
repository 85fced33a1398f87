"""What a batch counts for: with which switches it is refused, and what becomes of one that gives no gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tiny import TinyModel, loader, own_run, trainer

import hivenb
from hivenb.errors import OptionsError
from hivenb.strategy import HivemindStrategy


def strategy(swarm: hivenb.Swarm, target: int = 8, **kwargs: Any) -> HivemindStrategy:
    return HivemindStrategy(target, dht=swarm.dht, matchmaking_time=0.5, averaging_timeout=20.0, **own_run(), **kwargs)


class Manual(TinyModel):
    """Steps by hand, once for two batches, as a plain loop of torch's would."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx) / 2)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


class TestStepsByHand:
    """How many backward passes make a step is not known, so gradients that are summed in the model have no unit."""

    def test_do_not_go_with_gradients_that_are_summed_in_the_model(self, swarm: hivenb.Swarm) -> None:
        chosen = strategy(swarm, reuse_grad_buffers=True)
        with pytest.raises(MisconfigurationException, match=r"reuse_grad_buffers=True .*manual.*Leave out reuse_grad"):
            trainer(chosen, max_epochs=1).fit(Manual(), loader())
        assert chosen.optimizer is None

    def test_do_not_go_with_it_while_they_train_either(self, swarm: hivenb.Swarm) -> None:
        class Switching(Manual):
            def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
                if batch_idx == 3:
                    with pytest.raises(OptionsError, match="Leave out reuse_grad_buffers"):
                        chosen.change_options(before.replace(reuse_grad_buffers=True))

        chosen, model = strategy(swarm, target=16), Switching()
        before = chosen.options
        trainer(chosen, max_epochs=1).fit(model, loader())
        assert chosen.options is before
        assert chosen.hivemind_epoch == 4
        plain = TinyModel()
        trainer("auto", max_epochs=1).fit(plain, loader(64, 16))
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(one, other, atol=1e-6)
