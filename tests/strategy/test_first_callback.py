"""The strategy's own callback costs a batch nothing but what it does in it."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning import Callback
from lightning.pytorch.profilers import PassThroughProfiler
from tiny import DELAYS, TinyModel, loader, own_run, parameters, trainer

import hivenb
from hivenb.strategy import HivemindStrategy
from hivenb.strategy.callbacks import FirstCallback

BATCHES = 8


class Noted(PassThroughProfiler):
    """Counts in which contexts Lightning was."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def start(self, action_name: str) -> None:
        self.counts[action_name] += 1


def test_of_its_hooks_lightning_enters_no_empty_one_in_a_batch(swarm: hivenb.Swarm) -> None:
    noted, other = Noted(), type("Other", (Callback,), {})
    strategy = HivemindStrategy(16, dht=swarm.dht, **own_run())
    fit = trainer(strategy, max_epochs=1, callbacks=[other()], profiler=noted)
    fit.fit(TinyModel(), loader(8 * BATCHES), loader(8 * BATCHES))
    often = {name: count for name, count in noted.counts.items() if count >= BATCHES}
    assert often["[Callback]Other.on_before_zero_grad"] == BATCHES
    own = {name: count for name, count in often.items() if name.startswith("[Callback]FirstCallback")}
    assert own == {"[Callback]FirstCallback.on_train_batch_end": BATCHES}


def test_those_that_it_has_not_are_hooks_of_lightnings() -> None:
    left_out = [name for name, hook in vars(FirstCallback).items() if name.startswith("on_") and hook is None]
    assert left_out
    assert all(callable(getattr(Callback, name)) for name in left_out)


def test_it_is_there_once_and_first(swarm: hivenb.Swarm) -> None:
    strategy = HivemindStrategy(16, dht=swarm.dht, **own_run())
    fit = trainer(strategy, max_epochs=1)
    for _ in range(2):
        fit.fit(TinyModel(), loader(64))
        assert [isinstance(one, FirstCallback) for one in fit.callbacks] == [True, *[False] * (len(fit.callbacks) - 1)]


@pytest.mark.parametrize("is_ahead", [True, False])
@pytest.mark.parametrize("hook", ["on_validation_start", "on_train_end"])
def test_without_an_averager_nobody_sees_a_model_that_is_ahead(hook: str, is_ahead: bool) -> None:
    finished: list[bool] = []
    optimizer: Any = SimpleNamespace(
        is_alive=lambda: False, is_to_be_finished=is_ahead, finish_delayed_updates=lambda: finished.append(True)
    )
    training: Any = SimpleNamespace(optimizer=optimizer)
    getattr(FirstCallback(training), hook)(None, None)
    assert finished == [True] * is_ahead


class Saves(TinyModel):
    """Keeps its parameters at the end of each pass, as who saves a model there does."""

    def on_train_epoch_end(self) -> None:
        self.saved = parameters(self)


@pytest.mark.parametrize("length", [{"max_epochs": 2}, {"max_epochs": 9, "max_steps": 8}], ids=["epochs", "steps"])
def test_at_the_end_of_the_last_pass_the_model_has_the_last_step(swarm: hivenb.Swarm, length: dict[str, int]) -> None:
    strategy = HivemindStrategy(16, dht=swarm.dht, **own_run(), **DELAYS, delay_compensation=False)
    model = Saves()
    trainer(strategy, **length).fit(model, loader(64))
    torch.testing.assert_close(model.saved, parameters(model))
