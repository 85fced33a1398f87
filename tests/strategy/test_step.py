"""What is done to gradients in the swarm's step: clipped as an average, unscaled, and left alone in between."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
from lightning import Callback, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tiny import DELAYS, QUIET, TinyModel, loader, own_run, parameters, trainer

import hivenb
from hivenb.engine.optimizer.optimizer import Optimizer
from hivenb.engine.optimizer.skipped_batches import GradScaler
from hivenb.strategy import HivemindStrategy

MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "reused gradient buffers": {"reuse_grad_buffers": True},
    "offloaded": {"offload_optimizer": True},
}
SGD = {"lr": 0.5}


def strategy(swarm: hivenb.Swarm, target: int = 16, **kwargs: Any) -> HivemindStrategy:
    return HivemindStrategy(target, dht=swarm.dht, matchmaking_time=0.5, averaging_timeout=20.0, **own_run(), **kwargs)


def difference(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))


def plainly_trained(steps: int, **trainer_kwargs: Any) -> list[torch.Tensor]:
    """By plain Lightning, with batches as large as the swarm's target."""
    model = TinyModel(**SGD)
    Trainer(**QUIET, max_steps=steps, **trainer_kwargs).fit(model, loader(64, 16))
    return parameters(model)


class TestClipping:
    @pytest.mark.parametrize("algorithm", ["norm", "value"])
    @pytest.mark.parametrize("mode", MODES)
    def test_it_is_the_average_that_is_clipped(self, swarm: hivenb.Swarm, mode: str, algorithm: str) -> None:
        """Clipping each batch would give another sum."""
        clip = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": algorithm}
        model = TinyModel(**SGD)
        trainer(strategy(swarm, **MODES[mode]), max_epochs=2, **clip).fit(model, loader(64, 4))
        expected = plainly_trained(8, **clip)
        assert difference(parameters(model), expected) < 1e-6
        assert difference(expected, plainly_trained(8)) > 0.01
        assert "configure_gradient_clipping" not in vars(model)

    @pytest.mark.parametrize("is_failing", [False, True])
    def test_so_is_one_whose_step_is_made_when_training_has_ended(
        self, swarm: hivenb.Swarm, monkeypatch: pytest.MonkeyPatch, is_failing: bool
    ) -> None:
        """It may still have been on its way, as after an error."""
        lengths: list[float] = []
        shutdown = Optimizer.shutdown

        def step_once_more(optimizer: Optimizer) -> None:
            for parameter in optimizer.opt.param_groups[0]["params"]:
                parameter.grad = torch.full_like(parameter, 100.0)
            before = [one.detach().clone() for one in optimizer.opt.param_groups[0]["params"]]
            optimizer.opt.step()
            lengths.append(difference(before, optimizer.opt.param_groups[0]["params"]))
            shutdown(optimizer)

        class Failing(TinyModel):
            def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
                if is_failing and batch_idx == 3:
                    raise ZeroDivisionError

        monkeypatch.setattr(Optimizer, "shutdown", step_once_more)
        training = trainer(strategy(swarm, offload_optimizer=True), max_epochs=1, gradient_clip_val=0.1)
        with pytest.raises(ZeroDivisionError) if is_failing else contextlib.nullcontext():
            training.fit(Failing(**SGD), loader(64, 4))
        assert len(lengths) == 1
        assert 0.0 < lengths[0] <= 0.5 * 0.1

    @pytest.mark.parametrize("is_offloaded", [True, False])
    def test_one_that_clips_the_modules_parameters_is_told_where_others_are_stepped(
        self, swarm: hivenb.Swarm, is_offloaded: bool
    ) -> None:
        class Clipping(TinyModel):
            def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
                torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)

        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            training = trainer(strategy(swarm, offload_optimizer=is_offloaded), max_steps=1)
            training.fit(Clipping(**SGD), loader(64, 16))
        told = [str(one.message) for one in warned if "optimizer.param_groups" in str(one.message)]
        assert bool(told) is is_offloaded

    def test_a_module_may_clip_in_its_own_way(self, swarm: hivenb.Swarm) -> None:
        class Clipping(TinyModel):
            clipped: list[type]

            def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
                self.clipped.append(type(optimizer))
                self.clip_gradients(optimizer, gradient_clip_val=1e-9, gradient_clip_algorithm="value")

        model = Clipping(**SGD)
        model.clipped, before = [], parameters(model)
        trainer(strategy(swarm), max_epochs=1).fit(model, loader(64, 4))
        assert model.clipped == [torch.optim.SGD] * 4
        assert difference(parameters(model), before) < 1e-7


class Spoil(Callback):
    """Makes the loss of one batch infinite."""

    def __init__(self, batch: int):
        self._batch = batch

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx == self._batch:
            loss.data.fill_(torch.inf)
            loss.register_hook(lambda grad: grad * torch.inf)


class Scales(Callback):
    def __init__(self) -> None:
        self.scales: list[float] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.scales.append(trainer.precision_plugin.scaler.get_scale())


class TestHalfPrecision:
    @pytest.mark.parametrize("mode", [*MODES, "all delays"])
    def test_it_trains_as_plain_lightning_does(self, swarm: hivenb.Swarm, mode: str) -> None:
        plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=64.0))
        model = TinyModel(**SGD)
        chosen = strategy(swarm, **{**MODES, "all delays": DELAYS}[mode])
        trainer(chosen, max_epochs=4, plugins=[plugin]).fit(model, loader(64, 4))
        assert chosen.hivemind_epoch == 16
        assert isinstance(plugin.scaler, GradScaler) is (mode == "reused gradient buffers")
        if mode != "all delays":
            assert difference(parameters(model), plainly_trained(16)) < 0.01

    @pytest.mark.parametrize("mode", MODES)
    def test_gradients_that_are_not_finite_are_skipped(self, swarm: hivenb.Swarm, mode: str) -> None:
        """Neither averaged nor counted, and the scale is lowered."""
        plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=64.0))
        model, scales = TinyModel(**SGD), Scales()
        chosen = strategy(swarm, target=4, **MODES[mode])
        trainer(chosen, max_epochs=1, plugins=[plugin], callbacks=[Spoil(3), scales]).fit(model, loader(64, 4))
        assert chosen.hivemind_epoch == 15
        assert all(bool(parameter.isfinite().all()) for parameter in parameters(model))
        assert scales.scales == [64.0] * 3 + [32.0] * 13


class TestZeroGrad:
    def test_a_hook_of_the_users_own_is_warned_about(self, swarm: hivenb.Swarm) -> None:
        class Own(TinyModel):
            def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
                raise AssertionError("not while gradients are reused")

        with pytest.warns(UserWarning, match=r"Own\.optimizer_zero_grad has no effect with reuse_grad_buffers=True"):
            trainer(strategy(swarm, reuse_grad_buffers=True), max_epochs=1).fit(Own(), loader())

    def test_none_of_the_users_own_needs_no_warning(self, swarm: hivenb.Swarm) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer(strategy(swarm, reuse_grad_buffers=True), max_epochs=1).fit(TinyModel(), loader())
        assert not [one for one in caught if "optimizer_zero_grad" in str(one.message)]

    def test_calling_it_by_hand_has_no_effect_either(self, swarm: hivenb.Swarm) -> None:
        """hivemind raises a ValueError."""

        class Impatient(TinyModel):
            def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
                optimizer = self.optimizers()
                assert not isinstance(optimizer, list)
                optimizer.zero_grad()
                return super().training_step(batch, batch_idx)

        model = Impatient(**SGD)
        trainer(strategy(swarm, reuse_grad_buffers=True), max_epochs=2).fit(model, loader(64, 4))
        assert difference(parameters(model), plainly_trained(8)) < 1e-6


def test_a_weight_average_with_a_rate_of_its_own_is_refused(swarm: hivenb.Swarm) -> None:
    with pytest.raises(MisconfigurationException, match=r"WeightAveraging"):
        trainer(strategy(swarm), max_epochs=1, callbacks=[StochasticWeightAveraging(swa_lrs=0.1)]).fit(
            TinyModel(), loader()
        )


class Unfreezing(BaseFinetuning):
    """Freezes the layer for a pass."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.layer)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.layer, optimizer)


def test_parameters_that_come_later_are_refused_and_ones_that_thaw_are_not(swarm: hivenb.Swarm) -> None:
    class Thawing(TinyModel):
        def on_train_epoch_start(self) -> None:
            self.layer.weight.requires_grad_(self.current_epoch > 0)

    with pytest.raises(MisconfigurationException, match=r"Unfreezing adds parameters .*requires_grad=True"):
        trainer(strategy(swarm), max_epochs=1, callbacks=[Unfreezing()]).fit(TinyModel(), loader())
    ours, plain = Thawing(**SGD), Thawing(**SGD)
    trainer(strategy(swarm), max_epochs=2).fit(ours, loader(64, 4))
    Trainer(**QUIET, max_epochs=2).fit(plain, loader(64, 16))
    assert difference(parameters(ours), parameters(plain)) < 1e-6


def test_batch_norm_over_a_process_group_is_refused(swarm: hivenb.Swarm) -> None:
    with pytest.raises(MisconfigurationException, match=r"sync_batchnorm=True needs a process group.*average_buffers"):
        trainer(strategy(swarm), max_epochs=1, sync_batchnorm=True).fit(TinyModel(), loader())
