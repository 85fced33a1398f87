"""Training in bfloat16: the model is what Lightning promises, and what peers average is in single precision."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning import Callback, Trainer
from tiny import DELAYS, QUIET, TinyModel, loader, own_run, parameters, trainer
from torch.utils.data import DataLoader

import hivenb
from hivenb.engine.optimizer.scheduled_rounds import EpochReport
from hivenb.strategy import HivemindStrategy

MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "offloaded": {"offload_optimizer": True},
    "reused gradient buffers": {"reuse_grad_buffers": True},
    "all delays": DELAYS,
}


def strategy(swarm: hivenb.Swarm, target: int, **kwargs: Any) -> HivemindStrategy:
    settings = {"matchmaking_time": 2.0, "averaging_timeout": 20.0, **own_run(), **kwargs}
    return HivemindStrategy(target, dht=swarm.dht, **settings)


class Types(Callback):
    """The types of all parameters, and of all that is averaged, while it trains."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        optimizer = trainer.strategy.optimizer
        self.parameters = {parameter.dtype for parameter in pl_module.parameters()}
        self.averaged = set()
        for averager in (optimizer.state_averager, optimizer.grad_averager):
            with averager.get_tensors() as tensors:
                self.averaged |= {tensor.dtype for tensor in tensors}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("precision", "expected"),
    [("32-true", torch.float32), ("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)],
)
def test_each_precision_trains_a_model_of_the_promised_type(
    swarm: hivenb.Swarm, precision: Any, expected: torch.dtype, mode: str
) -> None:
    types, model, plain = Types(), TinyModel(lr=0.1), TinyModel(lr=0.1)
    chosen = strategy(swarm, 16, **MODES[mode])
    trainer(chosen, max_epochs=4, precision=precision, callbacks=[types]).fit(model, loader(64, 8))
    assert chosen.hivemind_epoch == 16
    assert types.parameters == {expected}
    assert types.averaged == {torch.float32}
    Trainer(**QUIET, max_epochs=4, precision=precision).fit(plain, loader(64, 16))
    for one, other in zip(parameters(model), parameters(plain), strict=True):
        assert one.dtype == other.dtype == expected
        if mode != "all delays":  # its steps lag behind
            torch.testing.assert_close(one, other, rtol=0.0, atol=1e-6 if precision == "32-true" else 2e-2)


@pytest.mark.parametrize("mode", ["synchronous", "offloaded"])
def test_the_sum_of_many_batches_goes_on_growing(swarm: hivenb.Swarm, mode: str) -> None:
    """In bfloat16, adding ones ends at 256."""
    one_sample = (torch.ones(1, 4), torch.full((1, 2), 8.0))
    model, plain = TinyModel(lr=0.1), TinyModel(lr=0.1)
    chosen = strategy(swarm, 600, **MODES[mode])
    trainer(chosen, max_epochs=1, precision="bf16-true").fit(model, DataLoader([one_sample] * 600, batch_size=None))
    Trainer(**QUIET, max_epochs=1, precision="bf16-true").fit(plain, DataLoader([one_sample], batch_size=None))
    assert chosen.hivemind_epoch == 1
    for one, other in zip(parameters(model), parameters(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=2**-7, atol=0.0)


class Rounds(Callback):
    """Keeps what came out of each epoch, and ends training when there is enough.

    :param enough: asked after each epoch, with all reports so far
    """

    def __init__(self, enough: Callable[[list[EpochReport]], bool]):
        self._enough = enough

    def on_train_batch_start(self, *args: Any) -> None:
        time.sleep(0.03)  # as long as it takes the swarm to see who is there

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.reports: list[EpochReport] = []
        self.history: dict[int, list[torch.Tensor]] = {}

        def keep(report: EpochReport) -> None:
            self.reports.append(report)
            self.history[report.epoch] = parameters(pl_module)
            trainer.should_stop = self._enough(self.reports)

        trainer.strategy.on_epoch = keep


@pytest.fixture
def swarms() -> Iterator[tuple[hivenb.Swarm, hivenb.Swarm]]:
    """Two peers' DHTs, joined."""
    with hivenb.Swarm("single") as one, hivenb.Swarm("half", initial_peers=one.invite) as other:
        yield one, other


@pytest.mark.parametrize("mode", ["synchronous", "offloaded"])
def test_a_late_peer_in_bfloat16_trains_with_one_in_single_precision(
    swarms: tuple[hivenb.Swarm, hivenb.Swarm], mode: str
) -> None:
    """It downloads the state, and averages gradients and state, without a change of types on either side."""
    ready, done = threading.Event(), threading.Event()

    def single_is_done(reports: list[EpochReport]) -> bool:
        if reports[-1].epoch >= 2:
            ready.set()
        return done.is_set()

    single = Rounds(single_is_done)
    half = Rounds(lambda reports: sum(report.group_size == 2 for report in reports) >= 3)
    models = TinyModel(), TinyModel()

    def train(swarm: hivenb.Swarm, model: TinyModel, kept: Rounds, **flags: Any) -> None:
        chosen = strategy(swarm, 64, run_id="both", **MODES[mode])
        trainer(chosen, max_epochs=-1, callbacks=[kept], **flags).fit(model, loader(64, 8))

    other = threading.Thread(target=train, args=(swarms[0], models[0], single))
    other.start()
    try:
        assert ready.wait(60)
        train(swarms[1], models[1], half, precision="bf16-true")
    finally:
        done.set()
        other.join(60)
    assert not other.is_alive()
    assert {parameter.dtype for parameter in models[0].parameters()} == {torch.float32}
    assert {parameter.dtype for parameter in models[1].parameters()} == {torch.bfloat16}
    assert half.reports[0].epoch > 2, "it took over the epoch of the other one"
    together = [report.epoch for report in half.reports if report.group_size == 2]
    assert len(together) >= 3
    epoch = max(set(together) & set(single.history))
    for one, two in zip(single.history[epoch], half.history[epoch], strict=True):
        torch.testing.assert_close(one, two.float(), rtol=2**-7, atol=2**-7)
