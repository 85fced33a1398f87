"""What a batch counts for: with which switches it is refused, and what becomes of one that gives no gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tiny import MODES, TinyModel, loader, own_run, samples, trainer
from torch.utils.data import DataLoader, TensorDataset

import hivenb
from hivenb.errors import OptionsError
from hivenb.history import History
from hivenb.run.recorder import Recorder
from hivenb.strategy import HivemindStrategy


def strategy(swarm: hivenb.Swarm, target: int = 8, **kwargs: Any) -> HivemindStrategy:
    return HivemindStrategy(target, dht=swarm.dht, matchmaking_time=0.5, averaging_timeout=20.0, **own_run(), **kwargs)


def assert_same(one: TinyModel, other: TinyModel) -> None:
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6), (mine - theirs).abs().max()


class Manual(TinyModel):
    """Steps by hand, once for two batches, as a plain loop of torch's would."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx) / 2)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


class TestStepsByHand:
    """How many backward passes make a step is not known, so gradients that are summed in the model have no unit."""

    def test_do_not_go_with_gradients_that_are_summed_in_the_model(self, swarm: hivenb.Swarm) -> None:
        chosen = strategy(swarm, reuse_grad_buffers=True)
        with pytest.raises(MisconfigurationException, match=r"reuse_grad_buffers=True .*manual.*Leave out reuse_grad"):
            trainer(chosen, max_epochs=1).fit(Manual(), loader())
        assert chosen.optimizer is None

    def test_do_not_go_with_it_while_they_train_either(self, swarm: hivenb.Swarm) -> None:
        class Switching(Manual):
            def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
                if batch_idx == 3:
                    with pytest.raises(OptionsError, match="Leave out reuse_grad_buffers"):
                        chosen.change_options(before.replace(reuse_grad_buffers=True))

        chosen, model = strategy(swarm, target=16), Switching()
        before = chosen.options
        trainer(chosen, max_epochs=1).fit(model, loader())
        assert chosen.options is before
        assert chosen.hivemind_epoch == 4
        plain = TinyModel()
        trainer("auto", max_epochs=1).fit(plain, loader(64, 16))
        assert_same(model, plain)

    def test_are_made_for_a_helper_which_computes_nothing(self, swarm: hivenb.Swarm) -> None:
        class Refusing(Manual):
            def training_step(self, batch: Any, batch_idx: int) -> None:
                raise AssertionError("a helper makes no step of the module")

        chosen = strategy(swarm, auxiliary=True)
        helping = trainer(chosen, max_epochs=1, limit_train_batches=3)
        helping.fit(Refusing(), loader())
        assert chosen.optimizer is not None
        assert chosen.optimizer.skipped_batches.calls == helping.global_step == 3
        assert chosen.hivemind_epoch == 0


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "momentum": {"lr": 0.1, "momentum": 0.9},
    "weight decay": {"optimizer": torch.optim.AdamW, "lr": 0.1, "weight_decay": 0.5},
}


class Choosy(TinyModel):
    """Computes nothing for some batches.

    :param without: which of each pass, from 0
    """

    def __init__(self, *without: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.without = without

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        return None if batch_idx in self.without else super().training_step(batch, batch_idx)


def half_precision() -> dict[str, Any]:
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=64.0))]}


class TestNone:
    """A batch for which ``training_step`` returns None."""

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    @pytest.mark.parametrize("mode", MODES)
    def test_is_no_step_as_in_plain_lightning(self, swarm: hivenb.Swarm, mode: str, optimizer: str) -> None:
        ours, plain = (Choosy(0, 3, 4, 7, **OPTIMIZERS[optimizer]) for _ in range(2))
        chosen, samples = strategy(swarm, **MODES[mode]), []
        chosen.on_epoch = lambda report: samples.append(report.samples)
        trainer(chosen, max_epochs=3).fit(ours, loader())
        trainer("auto", max_epochs=3).fit(plain, loader())
        assert samples == [8] * 12
        assert chosen.optimizer is not None
        assert chosen.optimizer.skipped_batches.total == chosen.optimizer.skipped_batches.in_a_row == 0
        if mode != "all delays":  # what runs in the background comes when it comes
            assert_same(ours, plain)

    @pytest.mark.parametrize("mode", ["synchronous", "reused"])
    def test_is_none_with_scaled_gradients_either(self, swarm: hivenb.Swarm, mode: str) -> None:
        ours, plain = (Choosy(0, 3, 4, 7, **OPTIMIZERS["momentum"]) for _ in range(2))
        chosen = strategy(swarm, **MODES[mode])
        trainer(chosen, max_epochs=3, **half_precision()).fit(ours, loader())
        trainer("auto", max_epochs=3, **half_precision()).fit(plain, loader())
        assert chosen.hivemind_epoch == 12
        assert_same(ours, plain)

    @pytest.mark.parametrize("mode", ["synchronous", "reused", "offloaded"])
    def test_gives_no_samples_to_an_epoch_of_several(self, swarm: hivenb.Swarm, mode: str) -> None:
        ours, plain = Choosy(1, 4, **OPTIMIZERS["momentum"]), TinyModel(**OPTIMIZERS["momentum"])
        trainer(strategy(swarm, target=48, **MODES[mode]), max_epochs=3).fit(ours, loader())
        batches = [batch for index, batch in enumerate(loader()) if index not in (1, 4)]
        whole = [torch.cat(parts) for parts in zip(*batches, strict=True)]
        trainer("auto", max_epochs=3).fit(plain, DataLoader(TensorDataset(*whole), batch_size=48))
        assert_same(ours, plain)

    @pytest.mark.parametrize("scaled", [False, True])
    @pytest.mark.parametrize("without", [2, 3])
    def test_takes_nothing_from_batches_of_the_same_step(self, swarm: hivenb.Swarm, without: int, scaled: bool) -> None:
        chosen, samples = strategy(swarm, target=56), []
        chosen.on_epoch = lambda report: samples.append(report.samples)
        flags = half_precision() if scaled else {}
        trainer(chosen, max_epochs=3, accumulate_grad_batches=2, **flags).fit(Choosy(without), loader())
        assert samples == [56] * 3

    @pytest.mark.parametrize("scaled", [False, True])
    @pytest.mark.parametrize("mode", MODES)
    def test_joins_an_epoch_that_others_have_ended(self, swarm: hivenb.Swarm, mode: str, scaled: bool) -> None:
        epochs = []

        class Others(Callback):
            """As if others had given what was missing, while a batch gave nothing."""

            def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
                chosen.optimizer.tracker.target_batch_size = 8 if batch_idx == 1 else 64

            def on_train_batch_end(self, *args: Any) -> None:
                epochs.append(chosen.hivemind_epoch)

        chosen: Any = strategy(swarm, target=64, **MODES[mode])
        flags = half_precision() if scaled else {}
        trainer(chosen, max_steps=3, callbacks=[Others()], **flags).fit(Choosy(1), loader())
        assert epochs == [0, 1, 1]


def in_batches(*sizes: int) -> DataLoader[Any]:
    """The same samples in batches of these sizes."""
    parts = zip(*(part.split(sizes) for part in samples(sum(sizes))), strict=True)
    return DataLoader(list(parts), batch_size=None)


class TestSeveralBatchesForAStep:
    """The step is of the mean over all their samples, however many they are."""

    @pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "all delays"])
    @pytest.mark.parametrize(
        ("sizes", "without", "steps"),
        [
            ((8, 8, 8, 8), (), (16, 16)),
            ((8, 8, 4), (), (16, 4)),  # the pass ends within the group
            ((8, 8, 8), (1,), (8, 8)),
            ((6, 2, 1, 5), (), (8, 6)),
        ],
        ids=["whole", "the last of a pass", "one that gives none", "unequal"],
    )
    def test_count_by_their_samples(self, swarm: hivenb.Swarm, mode: str, sizes: Any, without: Any, steps: Any) -> None:
        ours, plain = (Choosy(*which, **OPTIMIZERS["momentum"]) for which in (without, ()))
        chosen = strategy(swarm, target=1, **MODES[mode])
        trainer(chosen, max_epochs=2, accumulate_grad_batches=2).fit(ours, in_batches(*sizes))
        batches = [part for i, part in enumerate(in_batches(*sizes)) if i not in without]
        whole = [torch.cat(parts).split(steps) for parts in zip(*batches, strict=True)]
        expected = DataLoader(list(zip(*whole, strict=True)), batch_size=None)
        trainer("auto", max_epochs=2).fit(plain, expected)
        assert chosen.hivemind_epoch == 4
        assert_same(ours, plain)

    @pytest.mark.parametrize("flags", [{"gradient_clip_val": 0.1}, half_precision()], ids=["clipped", "scaled"])
    def test_are_clipped_and_scaled_as_one(self, swarm: hivenb.Swarm, flags: Any) -> None:
        ours, plain = TinyModel(), TinyModel()
        trainer(strategy(swarm, target=1), max_epochs=2, accumulate_grad_batches=2, **flags).fit(
            ours, in_batches(6, 2, 5)
        )
        trainer("auto", max_epochs=2, gradient_clip_val=flags.get("gradient_clip_val")).fit(plain, in_batches(8, 5))
        for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(mine, theirs, atol=5e-3 if "plugins" in flags else 1e-6), (mine - theirs).abs().max()


class TakesApart(TinyModel):
    """Takes what it needs out of its batches, which are dicts."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step((batch.pop("x"), batch.pop("y")), batch_idx)


class SecondIsNone:
    """Collates samples into dicts, the second time into None, which Lightning leaves out."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, examples: Any) -> Any:
        self.calls += 1
        x, y = torch.utils.data.default_collate(examples)
        return None if self.calls == 2 else {"x": x, "y": y}


@pytest.mark.parametrize(("auxiliary", "samples"), [(False, 12), (True, 0)])
def test_samples_are_recorded_as_they_were_counted_before_the_step(
    swarm: hivenb.Swarm, auxiliary: bool, samples: int
) -> None:
    chosen, recorder = strategy(swarm, target=4, auxiliary=auxiliary), Recorder(History())
    assert chosen.samples_in_batch == 0
    data = DataLoader(loader(16).dataset, batch_size=4, collate_fn=SecondIsNone())
    trainer(chosen, max_epochs=1, callbacks=[recorder]).fit(TakesApart(), data)
    assert (recorder.steps, recorder.samples) == (4, samples)
    assert chosen.samples_in_batch == (0 if auxiliary else 4)
    assert chosen.hivemind_epoch == (0 if auxiliary else 3)
