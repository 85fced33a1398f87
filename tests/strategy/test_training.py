"""One peer, real Trainers: what is trained, saved, resumed and left behind, against what plain Lightning does."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hivemind.compression import Float16Compression
from lightning import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny import DELAYS, LOOPBACK, QUIET, TinyModel, loader, own_run, parameters, samples, trainer
from torch.utils.data import DataLoader

import hivenb
from hivenb.engine.optimizer.scheduled_rounds import EpochReport
from hivenb.strategy import HivemindStrategy

MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "float16": {"grad_compression": Float16Compression(), "state_averaging_compression": "float16"},
    "reused gradient buffers": {"reuse_grad_buffers": True},
    "averaging in background": {"delay_state_averaging": True},
    "offloaded": {"offload_optimizer": True},
    "all delays": DELAYS,
    "all delays, float16": {**DELAYS, "grad_compression": "float16"},
    "local updates": {"use_local_updates": True},
}
ADAM = {"optimizer": torch.optim.Adam, "lr": 0.05}


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)


def strategy(target: int = 16, **kwargs: Any) -> HivemindStrategy:
    own = own_run() if "dht" in kwargs else LOOPBACK
    return HivemindStrategy(target, **{"matchmaking_time": 0.5, "averaging_timeout": 20.0, **own, **kwargs})


def plain_training(count: int, batch_size: int, steps: int, **model_kwargs: Any) -> list[torch.Tensor]:
    """Parameters after plain Lightning's training on these samples."""
    model = TinyModel(**model_kwargs)
    Trainer(**QUIET, max_steps=steps).fit(model, loader(count, batch_size))
    return parameters(model)


def assert_same(got: list[torch.Tensor], expected: list[torch.Tensor], atol: float = 1e-6) -> None:
    for one, other in zip(got, expected, strict=True):
        assert torch.allclose(one, other, atol=atol), (one - other).abs().max()


class TestEachMode:
    @pytest.mark.parametrize("mode", MODES)
    def test_trains_and_validates(self, swarm: hivenb.Swarm, mode: str) -> None:
        model = TinyModel(**ADAM)
        reports: list[EpochReport] = []
        chosen = strategy(dht=swarm.dht, **MODES[mode])
        chosen.on_epoch = reports.append
        fitter = trainer(chosen, max_epochs=8)
        (before,) = trainer("auto").validate(model, loader(seed=1), verbose=False)
        fitter.fit(model, loader(64, 8), loader(seed=1))
        (after,) = fitter.validate(model, loader(seed=1), verbose=False)
        assert after["val_loss"] < 0.7 * before["val_loss"]
        assert chosen.hivemind_epoch == len(reports) == 8 * 64 // 16
        assert fitter.global_step == 8 * 64 // 8, "the Trainer counts the batches of this peer"
        assert swarm.is_open, "a borrowed DHT is not ended"

    @pytest.mark.parametrize("mode", ["synchronous", "reused gradient buffers", "offloaded"])
    def test_does_what_plain_lightning_does_with_larger_batches(self, swarm: hivenb.Swarm, mode: str) -> None:
        momentum = {"lr": 0.1, "momentum": 0.9}  # Adam would not mind gradients of another size
        model = TinyModel(**momentum)
        trainer(strategy(dht=swarm.dht, **MODES[mode]), max_epochs=2).fit(model, loader(64, 4))
        assert_same(parameters(model), plain_training(64, 16, 8, **momentum))


class Reports(Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.samples: list[int] = []
        trainer.strategy.on_epoch = lambda report: self.samples.append(report.samples)


class TestSamples:
    def test_the_last_smaller_batch_counts_as_what_it_is(self, swarm: hivenb.Swarm) -> None:
        reports = Reports()
        trainer(strategy(10, dht=swarm.dht), max_epochs=2, callbacks=[reports]).fit(TinyModel(), loader(10, 4))
        assert reports.samples == [10, 10]

    @pytest.mark.parametrize("reuse", [False, True])
    @pytest.mark.parametrize("epochs", [2, 3])
    def test_a_small_batch_at_the_beginning_does_not_blow_up_the_gradient(
        self, swarm: hivenb.Swarm, epochs: int, reuse: bool
    ) -> None:
        """Batches of 4, 4, 1; 4, 4, 1: after eight samples, the next swarm epoch begins with the small one."""
        model = TinyModel(lr=0.1)
        trainer(strategy(8, dht=swarm.dht, reuse_grad_buffers=reuse), max_epochs=epochs).fit(model, loader(9, 4))
        x, y = samples(9)
        order = list(range(9)) * epochs
        reference = TinyModel(lr=0.1)
        optimizer = reference.configure_optimizers()
        pending: list[int] = []
        for start in [i * 9 + j for i in range(epochs) for j in (0, 4, 8)]:
            pending += order[start : start + (1 if start % 9 == 8 else 4)]
            if len(pending) >= 8:
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(reference.layer(x[pending]), y[pending]).backward()
                optimizer.step()
                pending = []
        assert_same(parameters(model), parameters(reference))

    def test_batch_size_overrules_what_is_in_the_batches(self, swarm: hivenb.Swarm) -> None:
        reports = Reports()
        chosen = strategy(16, batch_size=8, dht=swarm.dht)
        trainer(chosen, max_epochs=1, callbacks=[reports]).fit(TinyModel(), loader(16, 4))
        assert reports.samples == [16, 16]

    @pytest.mark.parametrize(
        ("first", "batch_size", "counted"),
        [(torch.tensor(0.5), None, 1), (torch.ones(1), None, 1), (torch.ones(1), 8, 8), (torch.ones(8), None, 8)],
        ids=["a scalar first", "one number first", "batch_size given", "all alike"],
    )
    def test_a_batch_whose_tensors_differ_in_size_is_warned_of(
        self, swarm: hivenb.Swarm, first: torch.Tensor, batch_size: int | None, counted: int
    ) -> None:
        """Once, and by what has an effect here: Lightning names ``self.log``."""

        class Weighted(TinyModel):
            def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
                return super().training_step((batch["x"], batch["y"]), batch_idx)

        batches = [{"temperature": first, "x": x, "y": y} for x, y in loader(64, 8)]
        reports = Reports()
        chosen = strategy(8, dht=swarm.dht, batch_size=batch_size)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fitter = trainer(chosen, max_epochs=2, callbacks=[reports])
            fitter.fit(Weighted(), DataLoader(batches, batch_size=None))
        said = [str(one.message) for one in caught if "HivemindStrategy(batch_size=...)" in str(one.message)]
        assert [words for words in said if "taken for 1 samples" in words] == said
        assert len(said) == (counted == 1)
        assert not any("self.log" in str(one.message) for one in caught)
        assert reports.samples == [8] * (2 * counted)

    def test_accumulated_batches_count_together(self, swarm: hivenb.Swarm) -> None:
        reports = Reports()
        trainer(strategy(16, dht=swarm.dht), max_epochs=1, accumulate_grad_batches=2, callbacks=[reports]).fit(
            TinyModel(), loader(64, 4)
        )
        assert reports.samples == [16] * 4


class ManualModel(TinyModel):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        return loss


def test_manual_optimization(swarm: hivenb.Swarm) -> None:
    model = ManualModel(**ADAM)
    chosen = strategy(dht=swarm.dht)
    trainer(chosen, max_epochs=2).fit(model, loader(64, 4))
    assert_same(parameters(model), plain_training(64, 16, 8, **ADAM))


class TestLife:
    def test_the_constructor_and_validation_start_nothing(self) -> None:
        chosen = strategy()
        validator = trainer(chosen)
        model = TinyModel()
        validator.validate(model, loader(), verbose=False)
        assert chosen._dht is None
        assert chosen.optimizer is None
        assert chosen.num_peers == 1

    @pytest.mark.process
    def test_its_own_dht_lives_as_long_as_a_fit(self) -> None:
        chosen = strategy()
        alive = []

        class Look(Callback):
            def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
                alive.append(chosen._dht is not None and chosen._dht.is_alive())

        fitter = trainer(chosen, max_epochs=1, callbacks=[Look()])
        model = TinyModel()
        fitter.fit(model, loader(16, 8))
        assert alive == [True, True]
        assert chosen._dht is None

    def test_fit_validate_and_fit_again(self, swarm: hivenb.Swarm) -> None:
        """The second fit is one of the swarm too, and goes on."""
        chosen = strategy(dht=swarm.dht)
        fitter = trainer(chosen, max_epochs=1)
        model = TinyModel(**ADAM)
        fitter.fit(model, loader(64, 16))
        first = chosen.optimizer
        fitter.validate(model, loader(), verbose=False)
        fitter.fit_loop.max_epochs = 2
        fitter.fit(model, loader(64, 16))
        assert chosen.optimizer is not first
        assert chosen.hivemind_epoch == 4
        assert not chosen.optimizer.is_alive()
        half = TinyModel(**ADAM)
        for _ in range(2):  # plain Lightning starts with a new optimizer, too
            Trainer(**QUIET, max_epochs=1).fit(half, loader(64, 16))
        assert_same(parameters(model), parameters(half))

    def test_the_modules_hook_is_its_own_again(self, swarm: hivenb.Swarm) -> None:
        model = TinyModel()
        chosen = strategy(dht=swarm.dht, reuse_grad_buffers=True)
        trainer(chosen, max_epochs=1).fit(model, loader())
        assert "optimizer_zero_grad" not in vars(model)
        assert model.optimizer_zero_grad.__func__ is TinyModel.optimizer_zero_grad

    @pytest.mark.process
    def test_an_error_in_the_model_ends_everything(self) -> None:
        class Broken(TinyModel):
            def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
                if batch_idx == 2:
                    raise ValueError("broken")
                return super().training_step(batch, batch_idx)

        chosen = strategy()
        with pytest.raises(ValueError, match="broken"):
            trainer(chosen, max_epochs=1).fit(Broken(), loader())
        assert chosen._dht is None
        assert chosen.optimizer is not None
        assert not chosen.optimizer.is_alive()

    def test_a_hook_of_the_modules_own_is_restored(self, swarm: hivenb.Swarm) -> None:
        model = TinyModel()

        def own(*args: Any) -> None:
            raise AssertionError("not while gradients are reused")

        model.optimizer_zero_grad = own
        trainer(strategy(dht=swarm.dht, reuse_grad_buffers=True), max_epochs=1).fit(model, loader())
        assert model.optimizer_zero_grad is own


class TestCheckpoints:
    @pytest.mark.parametrize("mode", ["synchronous", "offloaded", "all delays"])
    def test_resuming_goes_on_as_if_nothing_had_happened(self, swarm: hivenb.Swarm, tmp_path: Path, mode: str) -> None:
        kwargs = {"scheduler_fn": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9), **MODES[mode]}

        def fit(model: TinyModel, run_id: str, epochs: int, path: Any = None, **more: Any) -> HivemindStrategy:
            chosen = strategy(dht=swarm.dht, run_id=run_id, **kwargs)
            trainer(chosen, max_epochs=epochs, **more).fit(model, loader(64, 8), ckpt_path=path)
            return chosen

        saver = ModelCheckpoint(tmp_path, filename="saved")
        fit(TinyModel(**ADAM), "before", 2, callbacks=[saver], enable_checkpointing=True)
        assert Path(saver.best_model_path) == tmp_path / "saved.ckpt"

        resumed = TinyModel(**ADAM)
        with torch.no_grad():
            resumed.layer.weight.zero_()
        chosen = fit(resumed, "after", 4, tmp_path / "saved.ckpt")
        assert chosen.hivemind_epoch == 16
        assert chosen.optimizer is not None
        assert chosen.optimizer.opt.param_groups[0]["lr"] == pytest.approx(0.05 * 0.9**16)
        assert {float(state["step"]) for state in chosen.optimizer.opt.state.values()} == {16.0}

        if mode != "all delays":  # there a checkpoint waits for a step that is late otherwise
            whole = TinyModel(**ADAM)
            fit(whole, "whole", 4)
            assert_same(parameters(resumed), parameters(whole), atol=1e-5)

    def test_plain_lightning_can_go_on(self, swarm: hivenb.Swarm, tmp_path: Path) -> None:
        model = TinyModel(**ADAM, scheduler=halving)
        fitter = trainer(strategy(dht=swarm.dht), max_epochs=2)
        fitter.fit(model, loader(64, 16))
        fitter.save_checkpoint(tmp_path / "saved.ckpt")
        plain = TinyModel(**ADAM, scheduler=halving)
        # it compares what it wants to restore with what is there, and takes only known types unless told otherwise
        Trainer(**QUIET, max_epochs=3).fit(plain, loader(64, 16), ckpt_path=tmp_path / "saved.ckpt")
        reference = TinyModel(**ADAM)
        optimizer = reference.configure_optimizers()
        for step, (x, y) in enumerate([*loader(64, 16)] * 3):
            optimizer.param_groups[0]["lr"] = 0.05 * 0.5 ** min(step, 8)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(reference.layer(x), y).backward()
            optimizer.step()
        assert_same(parameters(plain), parameters(reference))

    def test_a_checkpoint_of_plain_lightning_can_be_gone_on_with(self, swarm: hivenb.Swarm, tmp_path: Path) -> None:
        plain = Trainer(**QUIET, max_epochs=1)
        plain.fit(TinyModel(**ADAM), loader(64, 16))
        plain.save_checkpoint(tmp_path / "plain.ckpt")
        model = TinyModel(**ADAM)
        trainer(strategy(dht=swarm.dht), max_epochs=2).fit(model, loader(64, 16), ckpt_path=tmp_path / "plain.ckpt")
        assert_same(parameters(model), plain_training(64, 16, 8, **ADAM))

    @pytest.mark.parametrize("mode", ["synchronous", "offloaded"])
    def test_its_schedule_goes_on_at_an_epoch_of_the_swarm_that_agrees(
        self, swarm: hivenb.Swarm, tmp_path: Path, mode: str
    ) -> None:
        """A peer that joins then has the same rates."""
        rates, epochs = [], []

        class Look(Callback):
            def on_train_start(self, trainer: Any, pl_module: Any) -> None:
                epochs.append(trainer.strategy.hivemind_epoch)

            def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
                rates.append(trainer.optimizers[0].param_groups[0]["lr"])
                epochs.append(trainer.strategy.hivemind_epoch)

        model = {"lr": 1.0, "scheduler": lambda optimizer: {"scheduler": halving(optimizer), "interval": "step"}}
        plain = Trainer(**QUIET, max_epochs=1)
        plain.fit(TinyModel(**model), loader(64, 16))
        plain.save_checkpoint(tmp_path / "plain.ckpt")
        fitter = trainer(strategy(dht=swarm.dht, **MODES[mode]), max_epochs=2, callbacks=[Look()])
        fitter.fit(TinyModel(**model), loader(64, 16), ckpt_path=tmp_path / "plain.ckpt")
        assert epochs == [4, 5, 6, 7, 8]
        assert rates == [0.5**epoch for epoch in epochs[1:]]

    def test_without_a_schedule_it_is_not_the_first_epoch_of_the_swarm(
        self, swarm: hivenb.Swarm, tmp_path: Path
    ) -> None:
        """In which whoever joins would download nothing, and average untrained weights into those of the file."""
        plain = Trainer(**QUIET, max_epochs=1)
        plain.fit(TinyModel(**ADAM), loader(64, 16))
        plain.save_checkpoint(tmp_path / "plain.ckpt")
        chosen = strategy(1024, dht=swarm.dht)
        trainer(chosen, max_epochs=2).fit(TinyModel(**ADAM), loader(64, 16), ckpt_path=tmp_path / "plain.ckpt")
        assert chosen.hivemind_epoch == 1

    def test_only_the_weights_if_only_they_are_wanted(self, swarm: hivenb.Swarm, tmp_path: Path) -> None:
        fitter = trainer(strategy(dht=swarm.dht), max_epochs=1)
        fitter.fit(TinyModel(), loader())
        fitter.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
        saved = torch.load(tmp_path / "weights.ckpt", weights_only=True)
        assert "optimizer_states" not in saved
        assert set(saved["state_dict"]) == {"layer.weight", "layer.bias"}
