"""One batch whose loss is no number: skipped in each precision, seen by all who look, and never sent to others."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lightning import Callback
from lightning.pytorch.plugins import MixedPrecision
from tiny import DELAYS, MODES, TinyModel, loader, own_run, parameters, trainer
from torch.utils.data import DataLoader

import hivenb
from hivenb.engine.optimizer.skipped_batches import MOST_IN_A_ROW
from hivenb.errors import NotFiniteError
from hivenb.strategy import HivemindStrategy
from strategy.peers import Swarm, difference


class Spoil(Callback):
    """Makes the loss of some batches no number.

    :param batches: which of them, from 0; all without
    """

    def __init__(self, *batches: int):
        self._batches = batches

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        if not self._batches or trainer.fit_loop.epoch_loop.batch_idx in self._batches:
            loss.data.fill_(math.nan)
            loss.register_hook(lambda grad: grad * math.nan)


def strategy(swarm: hivenb.Swarm, **kwargs: Any) -> HivemindStrategy:
    """One whose epochs are a batch long."""
    return HivemindStrategy(4, dht=swarm.dht, matchmaking_time=0.5, averaging_timeout=20.0, **own_run(), **kwargs)


def precision(name: str) -> dict[str, Any]:
    if name != "16-mixed":
        return {"precision": name}
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=64.0))]}


@pytest.mark.parametrize("name", ["32-true", "bf16-mixed", "bf16-true", "16-mixed"])
def test_it_is_skipped_in_each_precision(swarm: hivenb.Swarm, name: str) -> None:
    for mode in ("synchronous", "all delays") if name == "32-true" else ("synchronous",):
        chosen, model = strategy(swarm, **MODES[mode]), TinyModel()
        trainer(chosen, max_epochs=1, callbacks=[Spoil(3, 7)], **precision(name)).fit(model, loader(64, 4))
        assert chosen.hivemind_epoch == 14
        assert chosen.optimizer is not None
        assert chosen.optimizer.skipped_batches.total == 2
        assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "all delays"])
def test_it_is_skipped_in_each_mode(swarm: hivenb.Swarm, mode: str) -> None:
    chosen, model = strategy(swarm, **MODES[mode]), TinyModel()
    trainer(chosen, max_epochs=1, callbacks=[Spoil(15)]).fit(model, loader(64, 4))
    without = TinyModel()
    trainer(strategy(swarm, **MODES[mode]), max_epochs=1, limit_train_batches=15).fit(without, loader(64, 4))
    assert chosen.hivemind_epoch == 15
    assert difference(parameters(model), parameters(without)) < 1e-6


def test_with_several_batches_a_step_all_of_that_step_is_skipped(swarm: hivenb.Swarm) -> None:
    chosen, model = strategy(swarm), TinyModel()
    fitting = trainer(chosen, max_epochs=1, callbacks=[Spoil(5)], accumulate_grad_batches=4)
    fitting.fit(model, loader(64, 4))
    assert chosen.hivemind_epoch == 3
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def test_a_module_that_clips_by_hand_has_it_skipped_as_well(swarm: hivenb.Swarm) -> None:
    class Manual(TinyModel):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx) * (math.nan if batch_idx == 3 else 1.0))
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()

    chosen, model = strategy(swarm), Manual()
    trainer(chosen, max_epochs=1).fit(model, loader(64, 4))
    assert chosen.hivemind_epoch == 15
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


@pytest.mark.parametrize("name", ["32-true", "16-mixed"])
def test_a_script_ends_with_an_error_when_all_are_skipped(swarm: hivenb.Swarm, name: str) -> None:
    model = TinyModel()
    with pytest.raises(NotFiniteError, match="batches in a row had gradients that are not finite"):
        trainer(strategy(swarm), max_epochs=9, callbacks=[Spoil()], **precision(name)).fit(model, loader(64, 4))
    for expected, got in zip(parameters(TinyModel()), parameters(model), strict=True):
        assert torch.equal(expected, got)


def test_a_run_marks_it_counts_it_and_says_it(swarm: hivenb.Swarm) -> None:
    run = hivenb.TrainingRun(
        TinyModel(),
        loader(64, 4),
        swarm=swarm,
        options=hivenb.Options(target_batch_size=4, **own_run()),
        accelerator="cpu",
        callbacks=[Spoil(3, 4, 5)],
        max_epochs=1,
    )
    run.start()
    assert run.wait(timeout=60)
    snapshot = run.history.snapshot()
    assert run.status.skipped_batches == snapshot.last("skipped_batches") == 3
    assert [event.text for event in snapshot.events if event.kind == "batch"] == [
        "batch 4 skipped: gradients not finite",
    ]
    assert any("Batch 4 is skipped: nan or inf in 2 of 2 gradients" in line for line in run.log_lines)
    assert math.isfinite(snapshot.series["loss"].values[0])
    (advice,) = run.advice
    assert advice.rule == "batches skipped"
    assert advice.figures == {"in_a_row": 3, "skipped": 3}
    assert advice.changes == {}
    assert run.status.epoch == 13


def test_a_run_ends_with_the_error_when_all_are_skipped_and_can_be_started_again(swarm: hivenb.Swarm) -> None:
    spoil = Spoil()
    run = hivenb.TrainingRun(
        TinyModel(),
        loader(64, 4),
        swarm=swarm,
        options=hivenb.Options(target_batch_size=4, **own_run()),
        accelerator="cpu",
        callbacks=[spoil],
        max_epochs=2,
    )
    run.start()
    with pytest.raises(NotFiniteError):
        run.wait(timeout=60)
    assert run.status.state.value == "failed"
    assert run.status.skipped_batches == MOST_IN_A_ROW
    spoil._batches = (-1,)
    run.start()
    assert run.wait(timeout=60)
    assert run.status.epoch > 0


class Normalized(TinyModel):
    """With layers that count what has gone through them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return super().training_step((x * math.nan if batch_idx == self.spoiled else x, y), batch_idx)

    spoiled = -1


@pytest.mark.parametrize("spoiled", [0, 15])
def test_statistics_of_layers_are_those_of_the_batches_that_count(swarm: hivenb.Swarm, spoiled: int) -> None:
    model, without = Normalized(), Normalized()
    model.spoiled = spoiled
    without.load_state_dict(model.state_dict())
    batches = list(loader(64, 4))
    others = [one for i, one in enumerate(batches) if i != spoiled]
    trainer(strategy(swarm), max_epochs=1).fit(model, DataLoader(batches, batch_size=None))
    trainer(strategy(swarm), max_epochs=1).fit(without, DataLoader(others, batch_size=None))
    for name, expected in without.state_dict().items():
        assert torch.allclose(expected, model.state_dict()[name], atol=1e-6), name


class Spoiled(TinyModel):
    """Whose loss is no number in five of eight batches."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * math.nan if batch_idx % 8 > 2 else loss


class Choosy(TinyModel):
    """That gives no gradient for five of eight batches."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        return None if batch_idx % 8 > 2 else super().training_step(batch, batch_idx)


#: Ways in which two peers train, one after the other: to start them takes longest.
KINDS: dict[str, dict[str, Any]] = {"synchronous": {}, "delays": DELAYS, "reused": {"reuse_grad_buffers": True}}


@pytest.mark.slow
def test_the_others_get_nothing_of_it(train_together: Swarm) -> None:
    cases = [*((Spoiled, kind) for kind in KINDS), (Choosy, "delays")]
    # summed in the model's own buffers, gradients of earlier batches are lost with those of a spoiled one: in two of
    # five epochs, none of that peer's batches count
    epochs = {"reused": 12}
    stages = [
        {
            "epochs": epochs.get(kind, 4),
            "target": 128,
            "strategy": {"run_id": f"{module.__name__}-{kind}", **KINDS[kind]},
        }
        for module, kind in cases
    ]
    sound, spoiled = train_together(
        stages, [{**stage, "module": module} for stage, (module, _) in zip(stages, cases, strict=True)]
    )
    for stage, kind in enumerate(cases):
        for peer in (sound, spoiled):
            for tensors in peer.history(stage).values():
                assert all(bool(tensor.isfinite().all()) for tensor in tensors), kind
        assert max(report.group_size for report in sound.reports(stage)) == 2, kind
        mine, theirs = (sum(report.samples for report in peer.reports(stage)) for peer in (sound, spoiled))
        assert 0 < theirs < mine, kind


def test_statistics_that_a_step_has_averaged_outlive_a_batch_that_is_skipped(swarm: hivenb.Swarm) -> None:
    class Normalized(TinyModel):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(4)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.before = self.norm.running_mean.clone()
            inputs = self.norm(batch[0] * (math.nan if batch_idx == 2 else 1.0))
            return super().training_step((inputs, batch[1]), batch_idx)

    def average(report: Any) -> None:
        assert model.norm.running_mean is not None
        model.norm.running_mean.fill_(7.0)  # as if others had been there

    chosen, model = strategy(swarm), Normalized()
    chosen.on_epoch = average
    trainer(chosen, max_epochs=1, limit_train_batches=4).fit(model, loader(64, 4))
    assert chosen.hivemind_epoch == 3
    assert torch.equal(model.before, torch.full((4,), 7.0)), "after the batch that was skipped"
