"""An interrupt, an exit and the like, raised where a run trains: an error of the run, and of nothing else."""

from __future__ import annotations

import itertools
import os

import pytest
import tiny
import torch
from lightning.pytorch.callbacks import Callback

import hivenb
from hivenb.errors import TrainingError
from hivenb.options import Options
from hivenb.run.status import RunState

pytestmark = pytest.mark.process

PATIENCE = 120.0

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def home():
    with hivenb.Swarm("exits") as swarm:
        yield swarm


class Raises(tiny.TinyModel):
    """Raises something at a place of one's choice, as long as it is to."""

    def __init__(self, error, place):
        super().__init__()
        self.error, self.place = error, place

    def raise_at(self, place):
        if self.place == place and self.error is not None:
            raise self.error

    def setup(self, stage):
        self.raise_at("setup")

    def configure_optimizers(self):
        self.raise_at("configure_optimizers")
        return super().configure_optimizers()

    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            self.raise_at("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.raise_at("validation_step")


class InCallback(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 3:
            pl_module.raise_at("callback")


def run_of(model, home, **options):
    options = Options(target_batch_size=16, run_id=f"exits-{next(_numbers)}", **options)
    data = tiny.loader(), tiny.loader()
    return hivenb.TrainingRun(
        model, data, swarm=home, options=options, accelerator="cpu", max_epochs=2, callbacks=[InCallback()]
    )


def assert_ends_in_words(run, name):
    with pytest.raises(TrainingError, match=rf"{name}.* was raised where the model is trained, in \w+ \(\w+\.py:\d+\)"):
        run.wait(timeout=PATIENCE)
    assert run.status.state is RunState.FAILED
    assert run.status.error.startswith(f"TrainingError: {name}")


#: One of them in each place, for each catches what may come there, and all of them in one.
PLACES = ["setup", "configure_optimizers", "training_step", "callback", "validation_step"]
RAISED = [
    *((KeyboardInterrupt, place) for place in PLACES),
    *((error, place) for error in (SystemExit, GeneratorExit) for place in ("training_step", "validation_step")),
]


@pytest.mark.parametrize(("kind", "place"), RAISED)
def test_a_run_ends_in_words_and_starts_again(home, kind, place):
    error = kind(3)
    model = Raises(error, place)
    run = run_of(model, home)
    run.start()
    assert_ends_in_words(run, type(error).__name__)
    assert home.dht.is_alive()
    model.error = None
    run.start()
    assert run.wait(timeout=PATIENCE)
    assert run.status.state is RunState.FINISHED
    assert run.status.epoch in (7, 8)  # with what was gathered for an epoch, or without it


def test_a_step_in_the_background_that_is_interrupted_ends_the_run(home):
    class Interrupted(torch.optim.SGD):
        def step(self, *args):
            raise KeyboardInterrupt

    class Steps(tiny.TinyModel):
        def configure_optimizers(self):
            return Interrupted(self.parameters(), lr=0.1)

    run = run_of(Steps(), home, **tiny.DELAYS)
    run.start()
    with pytest.raises(TrainingError, match="KeyboardInterrupt was raised"):
        run.wait(timeout=PATIENCE)


def test_the_trainer_of_a_run_is_interrupted_as_any_other_afterwards(home):
    model = Raises(None, "validation_step")
    run = run_of(model, home)
    run.start()
    assert run.wait(timeout=PATIENCE)
    model.error = KeyboardInterrupt()
    with pytest.raises(SystemExit):  # what Lightning makes of it
        run.trainer.validate(model, tiny.loader(), verbose=False)


def test_a_run_ends_although_what_follows_it_cannot_be_ended(home, monkeypatch):
    options = Options(target_batch_size=16, run_id=f"exits-{next(_numbers)}")
    run = hivenb.TrainingRun(tiny.PacedModel(), tiny.loader(), swarm=home, options=options, accelerator="cpu")
    run.start()
    assert run.wait(epochs=1, timeout=PATIENCE)
    monitor, close = run._fit.monitor, run._fit.monitor.close

    def closes_in_vain():
        close()
        raise OSError("no descriptors left")

    monkeypatch.setattr(monitor, "close", closes_in_vain)
    run.stop(wait=False)
    with pytest.raises(OSError, match="no descriptors"):
        run.wait(timeout=PATIENCE)
    assert run.status.state is RunState.FAILED
    assert run.status.error == "OSError: no descriptors left"
    assert run.kept_folder.checkpoint is not None
    run.start()
    assert run.wait(epochs=run.status.epoch + 1, timeout=PATIENCE)
    run.stop()


@pytest.mark.slow
def test_a_local_peer_says_what_was_raised_in_it_and_the_run_trains_on(home, eventually):
    here = os.getpid()

    class Elsewhere(tiny.PacedModel):
        def training_step(self, batch, batch_idx):
            if os.getpid() != here:
                raise SystemExit
            return super().training_step(batch, batch_idx)

    options = Options(target_batch_size=16, run_id=f"exits-{next(_numbers)}")
    run = hivenb.TrainingRun(Elsewhere(), tiny.loader(), swarm=home, options=options, accelerator="cpu")
    run.start()
    (peer,) = home.add_local_peers(1, run)
    eventually(lambda: peer.state == "failed", PATIENCE)
    assert "SystemExit was raised where the model is trained" in peer.why_ended
    assert run.wait(epochs=2, timeout=PATIENCE)
    run.stop()
