"""Lightning's own promises, kept under the strategy: one peer with a real Trainer, against a Trainer without it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, Trainer
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import Logger
from tiny import DELAYS, LOOPBACK, QUIET, TinyModel, loader, own_run, parameters, samples, trainer
from torch.utils.data import DataLoader, IterableDataset

import hivenb
from hivenb.strategy import HivemindStrategy
from hivenb.strategy import strategy as hivemind_strategy

MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "reused gradient buffers": {"reuse_grad_buffers": True},
    "all delays": DELAYS,
}
ADAM = {"optimizer": torch.optim.Adam, "lr": 0.05}


class Model(TinyModel):
    """With a step for everything that a Trainer can do."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        self.log("swarm_epoch", float(getattr(self.trainer.strategy, "hivemind_epoch", 0)))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", super().training_step(batch, batch_idx))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", super().training_step(batch, batch_idx))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0])


def strategy(target: int = 16, **kwargs: Any) -> HivemindStrategy:
    own = own_run() if "dht" in kwargs else LOOPBACK
    return HivemindStrategy(target, **{"matchmaking_time": 0.5, "averaging_timeout": 20.0, **own, **kwargs})


def assert_same(got: list[torch.Tensor], expected: list[torch.Tensor], atol: float = 1e-6) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.allclose(one, other, atol=atol), (one - other).abs().max()


def assert_nothing_left(chosen: HivemindStrategy) -> None:
    assert chosen.optimizer is not None
    assert not chosen.optimizer.is_alive()
    assert chosen._dht is None


class TestEvaluation:
    @pytest.mark.parametrize("inference_mode", [True, False])
    @pytest.mark.parametrize("mode", MODES)
    def test_during_training_changes_nothing(self, swarm: hivenb.Swarm, mode: str, inference_mode: bool) -> None:
        class Count(Callback):
            losses: list[float] = []  # noqa: RUF012

            def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
                self.losses.append(float(trainer.callback_metrics["val_loss"]))

        with_and_without = []
        for run_id, data in (("with", loader(16, seed=1)), ("without", None)):
            model, count = Model(**ADAM), Count()
            count.losses = []
            chosen = strategy(dht=swarm.dht, run_id=run_id, **MODES[mode])
            # two batches to an epoch: in the middle of one, too
            flags = {"val_check_interval": 3, "check_val_every_n_epoch": None, "inference_mode": inference_mode}
            trainer(chosen, max_epochs=2, callbacks=[count], **flags).fit(model, loader(64, 8), data)
            assert chosen.hivemind_epoch == 8
            assert len(count.losses) == (5 if data else 0)
            assert count.losses == [] or count.losses[-1] < count.losses[0]
            with_and_without.append(parameters(model))
        if mode != "all delays":  # what runs in the background comes when it comes
            assert_same(*with_and_without)

    def test_test_and_predict_start_no_swarm(self) -> None:
        chosen, model = strategy(), Model()
        alone = trainer(chosen)
        plain = Trainer(**QUIET)
        assert alone.test(model, loader(), verbose=False) == plain.test(Model(), loader(), verbose=False)
        predicted, expected = alone.predict(model, loader()), plain.predict(Model(), loader())
        assert predicted is not None
        assert expected is not None
        assert all(torch.equal(one, other) for one, other in zip(predicted, expected, strict=True))
        assert chosen._dht is None
        assert chosen.optimizer is None


class TestCallbacks:
    @pytest.mark.process
    def test_early_stopping_ends_everything(self) -> None:
        chosen = strategy()
        fitter = trainer(chosen, max_epochs=50, callbacks=[EarlyStopping("val_loss", stopping_threshold=1e9)])
        fitter.fit(Model(), loader(), loader(seed=1))
        assert (fitter.current_epoch, fitter.global_step) == (1, 8)
        assert_nothing_left(chosen)

    @pytest.mark.parametrize("mode", MODES)
    def test_the_best_checkpoints_are_kept(self, swarm: hivenb.Swarm, tmp_path: Path, mode: str) -> None:
        saver = ModelCheckpoint(tmp_path, "{epoch}-{val_loss:.3f}", monitor="val_loss", save_top_k=2, save_last=True)
        fitter = trainer(
            strategy(dht=swarm.dht, **MODES[mode]), max_epochs=4, callbacks=[saver], enable_checkpointing=True
        )
        fitter.fit(Model(**ADAM), loader(), loader(seed=1))
        assert len(list(tmp_path.iterdir())) == 3
        assert {path.name.split("-")[0] for path in tmp_path.iterdir()} == {"epoch=2", "epoch=3", "last.ckpt"}
        assert saver.best_model_score is not None
        (again,) = Trainer(**QUIET).validate(
            Model.load_from_checkpoint(saver.best_model_path), loader(seed=1), verbose=False
        )
        assert again["val_loss"] == pytest.approx(float(saver.best_model_score))

    def test_see_the_hooks_that_they_see_in_plain_lightning(self, swarm: hivenb.Swarm, tmp_path: Path) -> None:
        def hooks(chosen: Any, path: Path) -> list[str]:
            seen: list[str] = []
            saver = ModelCheckpoint(path, every_n_train_steps=2)
            callbacks = [_recorder("first", seen), saver, _recorder("second", seen)]
            flags = {"accumulate_grad_batches": 2, "enable_checkpointing": True, "num_sanity_val_steps": 1}
            fitter = Trainer(**{**QUIET, **flags}, strategy=chosen, max_epochs=2, callbacks=callbacks)
            fitter.fit(Model(), loader(40, 8), loader(8))
            return seen

        ours = hooks(strategy(dht=swarm.dht), tmp_path / "ours")
        assert ours == hooks("auto", tmp_path / "plain")
        assert {"first.on_before_zero_grad", "second.on_save_checkpoint", "second.on_validation_end"} <= set(ours)


def _recorder(name: str, seen: list[str]) -> Callback:
    """A callback that notes each hook which is called."""

    def note(hook: str) -> Any:
        return lambda self, *args, **kwargs: seen.append(f"{name}.{hook}")

    hooks = [hook for hook in dir(Callback) if hook.startswith("on_") or hook in ("setup", "teardown")]
    return type(name, (Callback,), {hook: note(hook) for hook in hooks})()


class Notes(Logger):
    """A logger of somebody's own."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[tuple[int | None, dict[str, float]]] = []

    name = version = "notes"

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.metrics.append((step, metrics))


def test_loggers_get_the_epochs_of_the_swarm_at_the_steps_of_this_peer(swarm: hivenb.Swarm, tmp_path: Path) -> None:
    notes, table = Notes(), CSVLogger(tmp_path)
    trainer(strategy(dht=swarm.dht), max_epochs=1, logger=[notes, table], log_every_n_steps=1).fit(Model(), loader())
    assert [step for step, _ in notes.metrics] == list(range(8))
    assert [metrics["swarm_epoch"] for _, metrics in notes.metrics] == [0, 0, 1, 1, 2, 2, 3, 3]
    lines = (Path(table.log_dir) / "metrics.csv").read_text().splitlines()
    assert len(lines) == 1 + 8
    assert "train_loss" in lines[0]


class Batches(Callback):
    """Batches of this peer."""

    count = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.count += 1


class TestLimits:
    """Ten batches of eight in each epoch of the data; two of them make one of the swarm."""

    @pytest.mark.parametrize(
        ("flags", "batches", "steps", "epochs"),
        [
            ({"max_steps": 5}, 5, 5, 2),
            ({"max_steps": 5, "accumulate_grad_batches": 2}, 10, 5, 5),
            ({"max_epochs": 2, "accumulate_grad_batches": 4}, 20, 6, 6),
            ({"max_epochs": 2}, 20, 20, 10),
            ({"max_epochs": 3, "limit_train_batches": 3}, 9, 9, 4),
            ({"max_epochs": 2, "limit_train_batches": 0.5}, 10, 10, 5),
            ({"max_epochs": 3, "overfit_batches": 2}, 6, 6, 3),
            ({"fast_dev_run": True}, 1, 1, 0),
            ({"fast_dev_run": 4}, 4, 4, 2),
            ({"max_epochs": 0}, 0, 0, 0),
            ({"max_epochs": 1, "min_steps": 3, "max_steps": 4}, 4, 4, 2),
        ],
        ids=str,
    )
    def test_count_what_lightning_documents(
        self, swarm: hivenb.Swarm, flags: dict[str, Any], batches: int, steps: int, epochs: int
    ) -> None:
        """``global_step`` counts this peer's optimizer steps, ``hivemind_epoch`` those of the swarm."""
        counter, chosen = Batches(), strategy(dht=swarm.dht)
        fitter = trainer(chosen, callbacks=[counter], **flags)
        fitter.fit(Model(), loader(80, 8))
        assert (counter.count, fitter.global_step, chosen.hivemind_epoch) == (batches, steps, epochs)

    @pytest.mark.process
    def test_max_time_ends_an_endless_training(self) -> None:
        chosen = strategy()
        fitter = trainer(chosen, max_epochs=-1, max_time=timedelta(seconds=1))
        fitter.fit(Model(), loader())
        assert fitter.should_stop
        assert chosen.hivemind_epoch > 0
        assert_nothing_left(chosen)


@pytest.mark.parametrize("mode", [{}, {"reuse_grad_buffers": True}, {"offload_optimizer": True}], ids=str)
def test_accumulated_batches_are_one_batch_of_the_same_samples(swarm: hivenb.Swarm, mode: dict[str, Any]) -> None:
    """Four samples each, two batches for one step of this peer, and two such steps for one of the swarm."""
    model, plain = TinyModel(momentum=0.9), TinyModel(momentum=0.9)  # Adam would not mind a wrong factor
    trainer(strategy(dht=swarm.dht, **mode), max_epochs=2, accumulate_grad_batches=2).fit(model, loader(64, 4))
    Trainer(**QUIET, max_epochs=2).fit(plain, loader(64, 16))
    assert_same(parameters(model), parameters(plain))


class MovesOptimizers(Callback):
    """Does before training what Lightning does where the model is on a GPU, with another device."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for optimizer in trainer.strategy.optimizers:
            _optimizer_to_device(optimizer, torch.device("meta"))


def test_an_offloaded_optimizer_stays_in_main_memory(swarm: hivenb.Swarm) -> None:
    model, plain = TinyModel(**ADAM), TinyModel(**ADAM)
    chosen = strategy(dht=swarm.dht, offload_optimizer=True)
    trainer(chosen, max_epochs=2, callbacks=[MovesOptimizers()]).fit(model, loader(64, 16))
    Trainer(**QUIET, max_epochs=2).fit(plain, loader(64, 16))
    assert_same(parameters(model), parameters(plain))


def test_gradients_that_are_summed_in_place_are_there_before_the_first_batch(swarm: hivenb.Swarm) -> None:
    places: list[set[int]] = []

    class Watching(TinyModel):
        def on_before_backward(self, loss: torch.Tensor) -> None:
            places.append({one.grad.data_ptr() for one in self.parameters() if one.grad is not None})

    trainer(strategy(dht=swarm.dht, reuse_grad_buffers=True), max_epochs=2).fit(Watching(), loader(64, 16))
    assert len(places[0]) == 2
    assert places == [places[0]] * 8


class Stream(IterableDataset[Any]):
    """Samples without a known number."""

    def __iter__(self) -> Iterator[Any]:
        return iter(list(zip(*samples(22), strict=True)))


def test_a_stream_of_unknown_length_with_a_small_last_batch(swarm: hivenb.Swarm) -> None:
    counted: list[int] = []
    model, plain = TinyModel(momentum=0.9), TinyModel(momentum=0.9)
    chosen = strategy(22, dht=swarm.dht)
    chosen.on_epoch = lambda report: counted.append(report.samples)
    trainer(chosen, max_epochs=3).fit(model, DataLoader(Stream(), batch_size=4))
    Trainer(**QUIET, max_epochs=3).fit(plain, loader(22, 22))
    assert counted == [22] * 3
    assert_same(parameters(model), parameters(plain))


@pytest.mark.parametrize(
    "flags",
    [
        {"devices": "auto"},
        {"devices": "1", "accelerator": "auto"},
        {"num_sanity_val_steps": 2},
        {"detect_anomaly": True},
        {"barebones": True},
        {"profiler": "simple"},
        {"reload_dataloaders_every_n_epochs": 1},
        {"enable_model_summary": True, "enable_progress_bar": True},
        {"precision": "32-true"},
        {"precision": "64-true"},
        {"precision": "bf16-mixed"},
    ],
    ids=str,
)
def test_the_switches_of_a_trainer_mean_the_same_in_a_swarm(swarm: hivenb.Swarm, flags: dict[str, Any]) -> None:
    model, other = Model(**ADAM), Model(**ADAM)
    chosen, plain = strategy(dht=swarm.dht), Trainer(**{**QUIET, **flags}, max_epochs=2)
    trainer(chosen, max_epochs=2, **flags).fit(model, loader(64, 16), loader(seed=1))
    plain.fit(other, loader(64, 16), loader(seed=1))
    assert chosen.hivemind_epoch == 8
    assert chosen.root_device == plain.strategy.root_device
    assert_same(parameters(model), parameters(other))


def test_freed_memory_is_kept_while_a_model_trains_on_a_cpu_and_no_longer(
    swarm: hivenb.Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(hivemind_strategy, "keep_for_what_follows", lambda: seen.append("kept"))
    monkeypatch.setattr(hivemind_strategy, "give_freed_memory_back", lambda: seen.append("given back"))

    class Watching(TinyModel):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            seen.append("a batch")

    trainer(strategy(dht=swarm.dht), max_steps=1).fit(Watching(), loader(64, 16))
    assert seen == ["kept", "a batch", "given back"]
