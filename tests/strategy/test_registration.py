"""Both of Lightning's packages take the strategy, as an object and by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import QUIET, TinyModel, loader, samples
from torch.utils.data import DataLoader, TensorDataset

import hivenb
from hivenb.strategy import HivemindStrategy
from hivenb.strategy.checks import REGISTERED_TARGET_BATCH_SIZE, make_known


@pytest.mark.process
def test_a_trainer_takes_it_by_its_name() -> None:
    from lightning import Trainer

    fitter = Trainer(strategy="hivemind", **QUIET, max_epochs=1)
    assert isinstance(fitter.strategy, HivemindStrategy)
    assert fitter.strategy.options.target_batch_size == REGISTERED_TARGET_BATCH_SIZE
    x, y = samples(REGISTERED_TARGET_BATCH_SIZE)
    fitter.fit(TinyModel(), DataLoader(TensorDataset(x, y), batch_size=4096))
    assert fitter.strategy.hivemind_epoch == 1


def test_making_it_known_twice_does_no_harm() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    before = list(StrategyRegistry.available_strategies())
    make_known(HivemindStrategy)
    assert StrategyRegistry.available_strategies() == before
    assert before.count("hivemind") == 1


def test_the_other_package_trains_with_it(swarm: hivenb.Swarm, tmp_path: Path) -> None:
    """Fits with a scheduler, clipping, callbacks and a logger, goes on from a checkpoint, validates and predicts."""
    pl = pytest.importorskip("pytorch_lightning")

    class Model(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.training_step(batch, batch_idx))

        def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.layer(batch[0])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)]

    strategy = HivemindStrategy(16, dht=swarm.dht, matchmaking_time=0.5, averaging_timeout=20.0)
    saver = pl.callbacks.ModelCheckpoint(tmp_path, monitor="val_loss")
    logger = pl.loggers.CSVLogger(tmp_path)
    fitter = pl.Trainer(
        **{**QUIET, "logger": logger, "enable_checkpointing": True},
        strategy=strategy,
        max_epochs=2,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        callbacks=[
            saver,
            pl.callbacks.EarlyStopping("val_loss"),
            pl.callbacks.LearningRateMonitor("step"),
            hivenb.SwarmStatsMonitor(),
        ],
    )
    model = Model()
    fitter.fit(model, loader(64, 8), loader(seed=1))
    assert strategy.hivemind_epoch == 8
    assert "hivemind_epoch" in (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0]
    (metrics,) = fitter.validate(model, loader(seed=1), verbose=False)
    assert metrics["val_loss"] > 0
    assert len(fitter.predict(model, loader(seed=1))) == 8
    again = HivemindStrategy(16, dht=swarm.dht, run_id="again", matchmaking_time=0.5, averaging_timeout=20.0)
    pl.Trainer(**QUIET, strategy=again, max_epochs=3).fit(
        Model(), loader(64, 8), loader(seed=1), ckpt_path=saver.best_model_path
    )
    assert again.hivemind_epoch == 12
