"""Lazy layers that have seen no batch are refused in hivenb's words; those that have, or are not trained, train."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tiny import TinyModel, loader, own_run, trainer

import hivenb
from hivenb.errors import LocalPeerError
from hivenb.options import Options
from hivenb.strategy import HivemindStrategy

pytestmark = pytest.mark.process


class Lazy(TinyModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.LazyLinear(2)


class LazyBuffer(TinyModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.LazyBatchNorm1d(affine=False), self.layer)


class SawBatch(Lazy):
    def configure_model(self) -> None:
        self.layer(torch.zeros(1, 4))


class NotTrained(TinyModel):
    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.LazyLinear(3)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.layer.parameters(), lr=0.1)


def strategy(swarm: hivenb.Swarm, **kwargs: object) -> HivemindStrategy:
    return HivemindStrategy(16, dht=swarm.dht, **own_run(), **kwargs)


REFUSED = {
    Lazy: r"layer\.weight has no values yet, as LazyLinear .* configure_model",
    LazyBuffer: r"layer\.0\.running_mean has no values yet, as LazyBatchNorm1d .* configure_model",
}


@pytest.mark.parametrize("module", REFUSED)
@pytest.mark.parametrize("offloaded", [False, True])
def test_what_has_no_values_is_refused(swarm: hivenb.Swarm, module: type[TinyModel], offloaded: bool) -> None:
    with pytest.raises(MisconfigurationException, match=REFUSED[module]):
        trainer(strategy(swarm, offload_optimizer=offloaded), max_epochs=1).fit(module(), loader())


@pytest.mark.parametrize("module", [SawBatch, NotTrained])
def test_what_has_values_or_is_not_trained_is_no_obstacle(swarm: hivenb.Swarm, module: type[TinyModel]) -> None:
    chosen = strategy(swarm)
    trainer(chosen, max_epochs=1).fit(module(), loader())
    assert chosen.hivemind_epoch == 4


@pytest.mark.parametrize("module", REFUSED)
def test_a_run_and_its_local_peers_say_so_and_train_after_a_batch(swarm: hivenb.Swarm, module: type[TinyModel]) -> None:
    model = module()
    options = Options(target_batch_size=16, **own_run())
    run = hivenb.TrainingRun(model, loader(), swarm=swarm, options=options, accelerator="cpu", max_epochs=1)
    run.start()
    with pytest.raises(MisconfigurationException, match=REFUSED[module]):
        run.wait(timeout=60)
    with pytest.raises(LocalPeerError, match=REFUSED[module]):
        swarm.add_local_peers(1, run)
    swarm.remove_local_peers()
    model.layer(torch.zeros(2, 4))
    run.start()
    assert run.wait(timeout=60)
    run.stop()
