"""Lightning's tuners try out batch sizes and learning rates in steps of their own, of which the swarm hears nothing."""

from __future__ import annotations

import copy
import gc
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.tuner import Tuner
from tiny import MODES, QUIET, TinyModel, loader, own_run, parameters
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader

import hivenb
from hivenb.engine.optimizer.skipped_batches import GradScaler, GradScalerOfBatches
from hivenb.strategy import HivemindStrategy
from hivenb.strategy.trials import Trials
from strategy.peers import PATIENCE, Start, stop

pytestmark = pytest.mark.process


@pytest.fixture(autouse=True, scope="module")
def what_is_there_is_no_garbage() -> None:
    """BatchSizeFinder looks for garbage before each size: in all that was imported, that takes half a second."""
    gc.collect()
    gc.freeze()


class Tuned(TinyModel):
    """With its data, whose batches have a size that can be found, and a rate that can.

    :param norm: whether it has running statistics
    """

    def __init__(self, *args: Any, norm: bool = False, lr: float = 0.05, **kwargs: Any):
        super().__init__(*args, lr=lr, **kwargs)
        self.lr, self.batch_size = lr, 8
        self.norm = torch.nn.BatchNorm1d(4) if norm else torch.nn.Identity()
        self.in_trials: list[Any] = []

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(160, self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(16, 8, seed=3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.nn.functional.mse_loss(self.layer(self.norm(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        self._optimizer_kwargs["lr"] = self.lr
        return super().configure_optimizers()


class Begins(Callback):
    """What training begins with, when nothing is tried out any more."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.parameters, self.step = parameters(pl_module), trainer.global_step
        self.buffers = {name: one.clone() for name, one in pl_module.named_buffers()}
        optimizer = trainer.optimizers[0]
        self.optimizer = copy.deepcopy(trainer.strategy.optimizer_state(getattr(optimizer, "optimizer", optimizer)))
        self.schedulers = [copy.deepcopy(one.scheduler.state_dict()) for one in trainer.lr_scheduler_configs]
        self.scale = getattr(getattr(trainer.precision_plugin, "scaler", None), "_init_scale", None)


def strategy(swarm: hivenb.Swarm, target: int = 8, **kwargs: Any) -> HivemindStrategy:
    return HivemindStrategy(target, dht=swarm.dht, matchmaking_time=0.5, averaging_timeout=20.0, **own_run(), **kwargs)


def trainer(chosen: Any, folder: Path, *callbacks: Callback, **kwargs: Any) -> Trainer:
    given = {} if chosen is None else {"strategy": chosen}
    return Trainer(
        **{**QUIET, "max_epochs": 1, "default_root_dir": folder, "callbacks": list(callbacks), **given, **kwargs}
    )


def of_batch_size() -> BatchSizeFinder:
    return BatchSizeFinder(steps_per_trial=3, max_trials=3)  # 2, 4 and 8


def of_rate(**kwargs: Any) -> LearningRateFinder:
    return LearningRateFinder(**{"min_lr": 1e-4, "max_lr": 10.0, "num_training_steps": 20, **kwargs})


def assert_same(first: Any, second: Any, but: tuple[str, ...] = ()) -> None:
    """The same numbers in the same places."""
    if isinstance(first, torch.Tensor):
        torch.testing.assert_close(first, second, rtol=0, atol=0)
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first.keys() - set(but):
            assert_same(first[key], second[key], but)
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            assert_same(one, other, but)
    else:
        assert first == second


def made_of_all(**kwargs: Any) -> Tuned:
    """With an optimizer, a schedule and buffers that all have a state."""
    return Tuned(torch.optim.AdamW, partial(ExponentialLR, gamma=0.9), norm=True, weight_decay=0.1, **kwargs)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("finder", [of_batch_size, partial(of_rate, update_attr=False)], ids=["batch size", "rate"])
def test_training_begins_as_without_trials(swarm: hivenb.Swarm, tmp_path: Path, mode: str, finder: Any) -> None:
    begun = []
    for callbacks in ([], [finder()]):
        begins, chosen = Begins(), strategy(swarm, **MODES[mode])
        model = made_of_all()
        trainer(chosen, tmp_path, *callbacks, begins).fit(model)
        assert (begins.step, model.batch_size) == (0, 8)
        assert chosen.hivemind_epoch == 20, "each of the batches has ended an epoch"
        begun.append(begins)
    first, second = begun
    assert_same(
        [first.parameters, first.buffers, first.optimizer, first.schedulers],
        [second.parameters, second.buffers, second.optimizer, second.schedulers],
    )


def test_training_is_as_in_plain_lightning(swarm: hivenb.Swarm, tmp_path: Path) -> None:
    found, ends = [], []
    for chosen in (None, strategy(swarm)):
        model, finder = Tuned(torch.optim.AdamW), of_rate()
        trainer(chosen, tmp_path, of_batch_size(), finder).fit(model)
        found.append((model.batch_size, model.lr, finder.optimal_lr.results))
        ends.append(parameters(model))
    (size, rate, results), (own_size, own_rate, own_results) = found
    assert (own_size, own_rate) == (size, rate)
    assert 1e-4 < rate < 10.0
    assert own_results["lr"] == pytest.approx(results["lr"])
    assert own_results["loss"] == pytest.approx(results["loss"], rel=1e-4)
    for mine, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_a_rate_is_found_in_all_modes(swarm: hivenb.Swarm, tmp_path: Path, mode: str) -> None:
    class Rates(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            seen.append(trainer.strategy.optimizer.opt.param_groups[0]["lr"])

    plain, model, seen = Tuned(), Tuned(), []
    trainer(None, tmp_path, of_rate()).fit(plain)
    trainer(strategy(swarm, **MODES[mode]), tmp_path, of_rate(), Rates()).fit(model)
    assert model.lr == pytest.approx(plain.lr, rel=0.3)
    assert seen == [model.lr] * 20, "the torch optimizer that makes the steps has it"


def test_a_tuner_finds_both_before_training(swarm: hivenb.Swarm, tmp_path: Path) -> None:
    model, chosen = Tuned(), strategy(swarm)
    one = trainer(chosen, tmp_path)
    tuner = Tuner(one)
    assert tuner.scale_batch_size(model, steps_per_trial=2, max_trials=2) == model.batch_size == 4
    found = tuner.lr_find(model, min_lr=1e-4, max_lr=10.0, num_training=40)
    assert model.lr == found.suggestion()
    one.fit(model)
    assert chosen.hivemind_epoch == 20
    assert chosen.optimizer.opt.param_groups[0]["lr"] == model.lr


def test_clipping_acts_on_each_step_of_a_trial(swarm: hivenb.Swarm, tmp_path: Path) -> None:
    results = []
    for chosen in (None, strategy(swarm)):
        finder = of_rate()
        trainer(chosen, tmp_path, finder, gradient_clip_val=0.01, accumulate_grad_batches=2).fit(Tuned())
        results.append(finder.optimal_lr.results["loss"])
    assert results[1] == pytest.approx(results[0], rel=1e-4)


def test_gradients_are_summed_over_the_batches_of_a_step_in_a_trial(swarm: hivenb.Swarm, tmp_path: Path) -> None:
    results = []
    for chosen in (None, strategy(swarm, reuse_grad_buffers=True)):
        finder = of_rate()
        trainer(chosen, tmp_path, finder, accumulate_grad_batches=2).fit(Tuned())
        results.append(finder.optimal_lr.results["loss"])
    assert results[1] == pytest.approx(results[0], rel=1e-4)


@pytest.mark.parametrize("reused", [False, True])
def test_a_scaler_is_tried_out_and_put_back(swarm: hivenb.Swarm, tmp_path: Path, reused: bool) -> None:
    results = []
    for chosen in (None, strategy(swarm, reuse_grad_buffers=reused)):
        finder = of_rate()
        plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=64.0))
        trainer(chosen, tmp_path, finder, plugins=[plugin]).fit(Tuned())
        results.append(finder.optimal_lr.results["loss"])
        if chosen is not None:
            assert chosen.hivemind_epoch == 20
            assert isinstance(plugin.scaler, GradScaler if reused else GradScalerOfBatches)
    assert results[1] == pytest.approx(results[0], rel=1e-2)


class ByHand(Tuned):
    """Steps by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, optimizer = super().training_step(batch, batch_idx), self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


def test_a_module_that_steps_by_hand_is_tried_out(swarm: hivenb.Swarm, tmp_path: Path) -> None:
    chosen, begins = strategy(swarm), Begins()
    trainer(chosen, tmp_path, of_batch_size(), begins).fit(ByHand())
    assert chosen.hivemind_epoch == 20
    assert_same(begins.parameters, parameters(ByHand()))


class Watching(Tuned):
    """Looks, in each batch of a trial, who is on the swarm's list and what can be downloaded here."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        chosen = self.trainer.strategy
        if not any(isinstance(one, Begins) for one in self.trainer.callbacks):
            tracker = chosen.optimizer.tracker
            listed = chosen.dht.get(tracker.training_progress_key, latest=True)
            on_list = [] if listed is None else [one for one in listed.value.values() if one.value is not None]
            self.in_trials.append((on_list, chosen.optimizer.state_averager.allow_state_sharing, chosen.hivemind_epoch))
        return super().training_step(batch, batch_idx)


def test_nobody_is_told_of_a_trial(swarm: hivenb.Swarm, tmp_path: Path) -> None:
    model, chosen, begins = Watching(), strategy(swarm), Begins()
    trainer(chosen, tmp_path, of_batch_size(), begins).fit(model)
    assert model.in_trials == [([], False, 0)] * 9
    assert chosen.optimizer.skipped_batches.total == 0
    assert chosen.hivemind_epoch == 20


class InBetween(BatchSizeFinder):
    """Looks for a batch size when training has begun; later, Lightning's finders make no steps any more."""

    def on_fit_start(self, *args: Any) -> None:
        pass

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 0:
            before = [parameters(pl_module), trainer.strategy.hivemind_epoch]
            self.scale_batch_size(trainer, pl_module)
            assert_same(before, [parameters(pl_module), trainer.strategy.hivemind_epoch])
            averager = trainer.strategy.optimizer.state_averager
            self.shares_again = averager.allow_state_sharing


@pytest.mark.parametrize("mode", MODES)
def test_training_goes_on_after_a_trial_in_its_midst(swarm: hivenb.Swarm, tmp_path: Path, mode: str) -> None:
    chosen, finder = strategy(swarm, **MODES[mode]), InBetween(steps_per_trial=3, max_trials=3)
    model = Tuned()
    one = trainer(chosen, tmp_path, finder, max_epochs=2)
    one.fit(model)
    assert finder.shares_again
    assert model.batch_size == 8
    assert chosen.hivemind_epoch == one.global_step == 40


class Waiting(Tuned):
    """Lets a trial take as long as others need for three epochs, as they do not wait for it."""

    others: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not any(isinstance(one, InBetween) for one in self.trainer.callbacks) and not self.in_trials:
            now = self.others.moments[-1].epoch
            self.in_trials.append(self.others.wait_for_epoch(now + 3).epoch)
        return super().training_step(batch, batch_idx)


@pytest.mark.timeout(300)
def test_others_train_on_and_are_joined_again(start_peer: Start, tmp_path: Path) -> None:
    other = start_peer(0, {"epochs": None, "target": 16, "strategy": {"run_id": "tried"}})
    other.wait_for_epoch(1)
    model, finder = Waiting(), InBetween(steps_per_trial=2, max_trials=2)
    model.others = other
    joined = threading.Event()

    class Meets(Callback):
        """Ends when it has met the other peer after its trial."""

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            time.sleep(0.05)
            report = trainer.strategy.last_epoch_report
            if model.in_trials and report is not None and report.group_size == 2:
                joined.set()
                trainer.should_stop = True

    with hivenb.Swarm("tried out", initial_peers=other.addresses) as swarm:
        chosen = HivemindStrategy(16, dht=swarm.dht, run_id="tried", matchmaking_time=3.0)
        trainer(chosen, tmp_path, finder, Meets(), max_epochs=-1, max_time={"seconds": PATIENCE}).fit(model)
    assert joined.is_set()
    during = [report.failed for report in other.reports()]
    assert during == [None] * len(during), "no round of theirs has waited for the one that was trying something out"
    assert chosen.hivemind_epoch >= model.in_trials[0]
    stop([other])


@pytest.mark.timeout(300)
def test_who_joins_has_the_rate_of_the_others_whatever_it_has_found(start_peer: Start, tmp_path: Path) -> None:
    other = start_peer(0, {"epochs": None, "target": 16, "strategy": {"run_id": "rate"}})
    other.wait_for_epoch(1)
    rates = []

    class Rates(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            rates.append(trainer.strategy.optimizer.opt.param_groups[0]["lr"])

    with hivenb.Swarm("joined", initial_peers=other.addresses) as swarm:
        chosen = HivemindStrategy(16, dht=swarm.dht, run_id="rate", matchmaking_time=3.0)
        model = Tuned()
        # to stop early is for a model that has all to learn: of one taken over, four times the loss is little
        trainer(chosen, tmp_path, of_rate(early_stop_threshold=None), Rates()).fit(model)
        assert chosen.optimizer.state_averager.states_taken > 0
    assert model.lr != 0.05, "what it has found"
    assert rates == [0.05] * 20
    stop([other])


def test_a_run_that_fails_in_a_trial_trains_the_next_time(swarm: hivenb.Swarm, tmp_path: Path) -> None:
    class Fails(Tuned):
        fails = True

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.fails and self.trainer.global_step == 2:
                raise ArithmeticError("in a trial")
            return super().training_step(batch, batch_idx)

    chosen, model = strategy(swarm, reuse_grad_buffers=True), Fails()
    one = trainer(chosen, tmp_path, finder := of_batch_size())
    with pytest.raises(ArithmeticError, match="in a trial"):
        one.fit(model)
    model.fails = False
    one.callbacks.remove(finder)
    one.fit(model)
    assert chosen.hivemind_epoch == 20


def test_what_only_looks_like_a_trial_trains(swarm: hivenb.Swarm, tmp_path: Path) -> None:
    class WithoutCallbacks(Callback):
        def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
            trainer.callbacks = []  # of which one would be a sign

    class ByItself(Callback):
        def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
            trainer.strategy._trials = Trials(trainer.strategy)
            trainer.strategy._trials.see_barrier = lambda name: None

    for callback in (WithoutCallbacks(), ByItself()):
        chosen = strategy(swarm)
        trainer(chosen, tmp_path, callback).fit(Tuned())
        assert chosen.hivemind_epoch == 20
