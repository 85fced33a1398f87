"""Whatever a callback puts into the module for a while: others download, and average, what was trained."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging
from tiny import DELAYS, LARGE_BATCH, PacedModel, TinyModel, in_large_batches, loader, own_run, trainer
from torch import nn

import hivenb
from hivenb.strategy import HivemindStrategy

#: What is put into the module for a while; nothing that is trained comes near it.
FOREIGN = 1e4

#: Where a callback puts it in, and where it puts back what was there.
PLACES = [
    ("on_validation_start", "on_validation_end"),
    ("on_validation_epoch_start", "on_validation_epoch_end"),
    ("on_train_batch_end", "on_train_batch_end"),
    ("on_train_epoch_end", "on_train_epoch_end"),
]


class NormModel(PacedModel):
    """With BatchNorm, whose statistics are served, too."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.layer = nn.Sequential(nn.BatchNorm1d(4), self.layer)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.layer(batch[0])


class Borrows(Callback):
    """Puts other weights and statistics into the module from one hook to another, and lets somebody look meanwhile.

    :param look: called with the Trainer when they are there
    """

    def __init__(self, start: str, end: str, look: Callable[[Any], None]):
        self._look, self._kept = look, dict[str, torch.Tensor]()
        setattr(self, start, self._borrow)
        if start != end:
            setattr(self, end, self._give_back)
        self._is_one = start == end

    @torch.no_grad()
    def _borrow(self, trainer: Any, module: Any, *args: Any) -> None:
        self._kept = {name: value.clone() for name, value in module.state_dict().items()}
        for value in module.state_dict().values():
            value.data.fill_(FOREIGN)
        self._look(trainer)
        if self._is_one:
            self._give_back(trainer, module)

    def _give_back(self, trainer: Any, module: Any, *args: Any) -> None:
        if self._kept:
            module.load_state_dict(self._kept)


def download(averager: Any, found: list[float]) -> None:
    _, tensors, _ = averager.get_current_state()
    found.append(max(float(one.abs().max()) for one in tensors if one.numel()))


@pytest.mark.parametrize(
    ("start", "end", "options"),
    [*((*place, {}) for place in PLACES), (*PLACES[0], {"offload_optimizer": True}), (*PLACES[2], DELAYS)],
)
def test_what_is_served_is_what_is_trained(swarm: hivenb.Swarm, start: str, end: str, options: dict[str, Any]) -> None:
    threads: list[threading.Thread] = []
    found: list[float] = []

    def look(own: Any) -> None:
        if own.strategy.hivemind_epoch > 0 and not threads:
            threads.append(threading.Thread(target=download, args=(own.strategy.optimizer.state_averager, found)))
            threads[0].start()
            threads[0].join(0.3)  # without a copy, it waits for the module

    strategy = HivemindStrategy(16, dht=swarm.dht, **own_run(), **options)
    fit = trainer(strategy, max_epochs=3, callbacks=[Borrows(start, end, look)])
    fit.fit(NormModel(), loader(48), loader(8))
    threads[0].join(30)
    (largest,) = found
    assert 0 < largest < FOREIGN / 10


def test_averages_that_a_callback_leaves_in_the_end_are_those_that_stay(swarm: hivenb.Swarm) -> None:
    strategy = HivemindStrategy(16, dht=swarm.dht, **own_run(), delay_state_averaging=True, offload_optimizer=True)
    averaging = EMAWeightAveraging(decay=0.5)
    model = TinyModel()
    fit = trainer(strategy, max_epochs=2, callbacks=[averaging])
    fit.fit(model, loader(64))
    for own, average in zip(model.parameters(), averaging._average_model.module.parameters(), strict=True):
        torch.testing.assert_close(own, average)


def run_of(swarm: hivenb.Swarm, callbacks: list[Any], **options: Any) -> hivenb.TrainingRun:
    return hivenb.TrainingRun(
        in_large_batches(NormModel()),
        (loader(256, LARGE_BATCH, shuffle=True), loader(8)),
        swarm=swarm,
        options=hivenb.Options(target_batch_size=256, matchmaking_time=2.0, **options),
        accelerator="cpu",
        callbacks=callbacks,
        check_val_every_n_epoch=2,
    )


@pytest.mark.process
@pytest.mark.parametrize("delayed", [False, True], ids=["synchronous", "state in the background"])
def test_peers_that_join_and_average_meanwhile_have_what_is_trained(delayed: bool) -> None:
    validates = threading.Event()

    def look(own: Any) -> None:
        if own.validating and own.strategy.hivemind_epoch > 0:
            validates.set()
            time.sleep(1.0)

    with hivenb.Swarm("a") as first, hivenb.Swarm.join(first.invite, "b") as second:
        callbacks = [Borrows(*PLACES[0], look), Borrows(*PLACES[2], look)]
        one = run_of(first, callbacks, delay_state_averaging=delayed)
        two = run_of(second, [], delay_state_averaging=delayed)
        one.start()
        assert validates.wait(60)
        two.start()
        assert two.wait(epochs=6, timeout=60)
        one.stop()
        two.stop()
        assert max(two.history.snapshot().series["group_size"].values) == 2
    for run in (one, two):
        assert (
            max(float(value.abs().max()) for value in run.model.state_dict().values() if value.is_floating_point()) < 10
        )
        assert max(run.history.snapshot().series["loss"].values) < 100
