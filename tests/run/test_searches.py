"""A run whose Trainer looks for a batch size or a learning rate before it trains."""

from __future__ import annotations

import itertools
import threading

import lightning
import pytest
import tiny
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder

import hivenb
from hivenb.options import Options
from hivenb.run.status import RunState

pytestmark = pytest.mark.process

PATIENCE = 120.0

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def swarm():
    with hivenb.Swarm("searches") as opened:
        yield opened


class Tuned(tiny.TinyModel):
    """With a rate that can be found."""

    def __init__(self):
        super().__init__(torch.optim.AdamW)
        self.lr, self.in_trial = 0.05, threading.Event()

    def configure_optimizers(self):
        self._optimizer_kwargs["lr"] = self.lr
        return super().configure_optimizers()


class Data(lightning.LightningDataModule):
    """With batches whose size can be found."""

    batch_size = 8

    def train_dataloader(self):
        return tiny.loader(160, self.batch_size)

    val_dataloader = train_dataloader


def run_in(swarm, model, *callbacks):
    options = Options(target_batch_size=8, run_id=f"searches-{next(_numbers)}")
    return hivenb.TrainingRun(
        model, Data(), swarm=swarm, options=options, accelerator="cpu", max_epochs=4, callbacks=list(callbacks)
    )


def test_a_run_trains_with_what_is_found_and_goes_on_with_it(swarm):
    model, rate = Tuned(), LearningRateFinder(min_lr=1e-4, max_lr=1.0, num_training_steps=40)
    size = BatchSizeFinder(steps_per_trial=2, max_trials=2)
    run = run_in(swarm, model, size, rate)
    run.start()
    assert run.wait(steps=20, timeout=PATIENCE)
    run.stop()
    found, optimizer = model.lr, run.trainer.strategy.optimizer
    assert found == rate.optimal_lr.suggestion() != 0.05
    assert optimizer.opt.param_groups[0]["lr"] == found
    assert run.data.batch_size == size.optimal_batch_size == 4

    epoch, steps = run.status.epoch, run.trainer.global_step
    rate.optimal_lr = None
    run.start()
    assert run.wait(epochs=2, timeout=PATIENCE)
    run.stop()
    assert rate.optimal_lr is None, "what was found stays"
    assert (model.lr, run.trainer.strategy.optimizer.opt.param_groups[0]["lr"]) == (found, found)
    assert run.status.epoch > epoch
    assert run.trainer.global_step > steps


def test_a_run_stops_in_the_midst_of_a_search(swarm):
    class Endless(Tuned):
        """Waits in the first batch that is tried out."""

        def training_step(self, batch, batch_idx):
            if not self.in_trial.is_set():
                self.in_trial.set()
                assert run._stage.wait_until(lambda: run.status.state is RunState.STOPPING, PATIENCE)
            return super().training_step(batch, batch_idx)

    model = Endless()
    before = tiny.parameters(model)
    run = run_in(swarm, model, LearningRateFinder(num_training_steps=10**6))
    run.start()
    assert model.in_trial.wait(PATIENCE)
    run.stop()
    assert run.status.state is RunState.STOPPED
    assert run.exception is None
    assert model.lr == 0.05
    for mine, old in zip(tiny.parameters(model), before, strict=True):
        torch.testing.assert_close(mine, old, rtol=0, atol=0)
