"""Learning rates move with the epochs of the swarm, whoever steps what in Lightning."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tiny import QUIET, TinyModel, loader, own_run, trainer
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, ReduceLROnPlateau

import hivenb
from hivenb.strategy import HivemindStrategy

MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "averaging in background": {"delay_state_averaging": True},
    "offloaded": {"offload_optimizer": True},
    "all delays": {
        "offload_optimizer": True,
        "delay_state_averaging": True,
        "delay_optimizer_step": True,
        "delay_grad_averaging": True,
    },
}

halving = partial(ExponentialLR, gamma=0.5)


def strategy(swarm: hivenb.Swarm, **kwargs: Any) -> HivemindStrategy:
    return HivemindStrategy(16, dht=swarm.dht, matchmaking_time=0.5, averaging_timeout=20.0, **own_run(), **kwargs)


class Seen(Callback):
    """The learning rate, and the swarm's epoch, before each batch."""

    def __init__(self) -> None:
        self.rates: list[tuple[int, float]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        optimizer = trainer.strategy.optimizer
        self.rates.append((optimizer.local_epoch, optimizer.opt.param_groups[0]["lr"]))


def seen_rates(swarm: hivenb.Swarm, model: TinyModel, **kwargs: Any) -> list[float]:
    """The rate after each of eight batches, of which two make an epoch of the swarm."""
    seen = Seen()
    trainer(strategy(swarm, **kwargs), max_epochs=1, callbacks=[seen]).fit(model, loader(64, 8))
    assert [epoch for epoch, _ in seen.rates] == [0, 1, 1, 2, 2, 3, 3, 4]
    return [rate for _, rate in seen.rates]


class Configured(TinyModel):
    """With what ``configure_optimizers`` is to return for its schedulers."""

    def __init__(self, schedulers: Any, **kwargs: Any):
        super().__init__(**kwargs)
        self._schedulers = schedulers

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return [optimizer], self._schedulers(optimizer)


@pytest.mark.parametrize("mode", MODES)
def test_scheduler_fn_moves_with_the_epochs_of_the_swarm(swarm: hivenb.Swarm, mode: str) -> None:
    seen = Seen()
    chosen = strategy(swarm, scheduler_fn=halving, **MODES[mode])
    trainer(chosen, max_epochs=1, callbacks=[seen]).fit(TinyModel(lr=1.0), loader(64, 8))
    assert [epoch for epoch, _ in seen.rates] == [0, 1, 1, 2, 2, 3, 3, 4]
    if mode != "all delays":  # there the rate changes when the step in the background does
        assert [rate for _, rate in seen.rates] == [0.5**epoch for epoch, _ in seen.rates]
    assert chosen.optimizer is not None
    assert chosen.optimizer.opt.param_groups[0]["lr"] == 0.5**4


@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize(
    ("frequency", "rates"),
    [(1, [1.0, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.0625]), (2, [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.25])],
)
def test_one_from_the_model_moves_with_the_epochs_of_the_swarm(
    swarm: hivenb.Swarm, interval: str, frequency: int, rates: list[float]
) -> None:
    """Whatever the epochs of its own data are: a peer that joins later has the same rate."""

    def schedulers(optimizer: torch.optim.Optimizer) -> Any:
        return [{"scheduler": halving(optimizer), "interval": interval, "frequency": frequency}]

    assert seen_rates(swarm, Configured(schedulers)) == rates


def test_several_move_together(swarm: hivenb.Swarm, tmp_path: Path) -> None:
    """Each with its own frequency; a checkpoint has the state of each, and plain Lightning can go on with it."""

    def schedulers(optimizer: torch.optim.Optimizer) -> Any:
        return [
            {"scheduler": halving(optimizer), "interval": "step"},
            {"scheduler": ExponentialLR(optimizer, gamma=0.1), "interval": "step", "frequency": 2},
        ]

    seen = Seen()
    fitter = trainer(strategy(swarm), max_epochs=1, callbacks=[seen])
    fitter.fit(Configured(schedulers), loader(64, 8))
    assert [rate for _, rate in seen.rates][1::2] == pytest.approx([0.5, 0.025, 0.0125, 0.000625])
    fitter.save_checkpoint(tmp_path / "two.ckpt")
    plain = Trainer(**QUIET, max_steps=9)
    plain.fit(Configured(schedulers), loader(64, 8), ckpt_path=tmp_path / "two.ckpt")
    assert plain.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.000625 * 0.5)


def test_a_checkpoint_of_plain_lightning_goes_on_at_its_rate(swarm: hivenb.Swarm, tmp_path: Path) -> None:
    """It knows of no epochs of the swarm: its schedule goes on from where it was, at once."""
    model = partial(TinyModel, lr=1.0, scheduler=partial(LambdaLR, lr_lambda=lambda step: 1 / (1 + step)))
    plain = Trainer(**QUIET, max_epochs=3)
    plain.fit(model(), loader(64, 16))
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    seen = Seen()
    trainer(strategy(swarm), max_epochs=4, callbacks=[seen]).fit(
        model(), loader(64, 16), ckpt_path=tmp_path / "plain.ckpt"
    )
    assert [rate for _, rate in seen.rates] == pytest.approx([1 / 5, 1 / 6, 1 / 7, 1 / 8])


def test_one_that_is_made_already_may_be_given(swarm: hivenb.Swarm) -> None:
    model = TinyModel(lr=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.configure_optimizers = lambda: optimizer
    rates = seen_rates(swarm, model, scheduler_fn=halving(optimizer))
    assert rates == [1.0, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.0625]


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    return [{"scheduler": ReduceLROnPlateau(optimizer), "monitor": "val_loss"}]


@pytest.mark.parametrize(
    ("model", "kwargs", "message"),
    [
        (lambda: Configured(plateau), {}, "ReduceLROnPlateau follows a metric that each peer measures"),
        (TinyModel, {"scheduler_fn": ReduceLROnPlateau}, "ReduceLROnPlateau follows a metric"),
        (TinyModel, {"scheduler_fn": halving(torch.optim.SGD([torch.zeros(1)]))}, "belongs to another optimizer"),
        (lambda: TinyModel(scheduler=halving), {"offload_optimizer": True}, r"HivemindStrategy\(scheduler_fn=\.\.\.\)"),
    ],
    ids=["plateau", "plateau by scheduler_fn", "of another optimizer", "of an offloaded optimizer"],
)
def test_what_cannot_follow_the_swarm_is_refused(
    swarm: hivenb.Swarm, model: Any, kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        trainer(strategy(swarm, **kwargs), max_epochs=1).fit(model(), loader())


@pytest.mark.parametrize("mode", ["synchronous", "offloaded"])
def test_lightnings_monitor_sees_the_rate(swarm: hivenb.Swarm, tmp_path: Path, mode: str) -> None:
    logger = CSVLogger(tmp_path)
    chosen = strategy(swarm, scheduler_fn=halving, **MODES[mode])
    trainer(chosen, max_epochs=1, logger=logger, log_every_n_steps=1, callbacks=[LearningRateMonitor("step")]).fit(
        TinyModel(lr=1.0), loader(64, 8)
    )
    lines = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    column = lines[0].split(",").index(next(name for name in lines[0].split(",") if name.startswith("lr-")))
    rates = [float(line.split(",")[column]) for line in lines[1:] if line.split(",")[column]]
    assert rates == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125]
