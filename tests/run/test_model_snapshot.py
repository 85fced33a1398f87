"""A copy of the model with the weights of one moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from torch import nn

import hivenb
from hivenb.errors import TrainingError
from hivenb.run.model_copy import copy_of, ready_to_predict
from hivenb.run.model_snapshot import take_snapshot
from hivenb.run.pause_and_stop import Stage
from hivenb.run.status import RunState

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def swarm() -> Iterator[hivenb.Swarm]:
    with hivenb.Swarm("snapshots") as opened:
        yield opened


def snapshot(model: Any) -> Any:
    return take_snapshot(model, Stage(), "cpu", 5.0, is_training=False)


class Attached(tiny.TinyModel):
    """Keeps what modules keep, for good or bad reasons."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.tied = nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied.weight = self.body.weight
        self.norm = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.old_norm = nn.utils.spectral_norm(nn.Linear(4, 4))
        self.optimizer_of_mine = self.configure_optimizers()
        self.losses: list[torch.Tensor] = []
        self.by_name: dict[str, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.old_norm(self.norm(self.tied(x))))


def test_a_copy_predicts_as_the_model_does_and_shares_nothing_with_it() -> None:
    model = Attached()
    x = torch.randn(3, 4)
    model.losses.append(model(x).sum())  # with its graph
    model.by_name["last"] = {"output": model(x)}
    model.losses[0].backward(retain_graph=True)
    made = snapshot(model)
    assert type(made) is Attached
    assert not made.training
    assert model.training
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in made.parameters())
    assert not made(x).requires_grad
    assert not made.losses[0].requires_grad
    assert made.tied.weight is made.body.weight
    assert made.optimizer_of_mine is None
    assert all(parameter.requires_grad for parameter in model.parameters())
    expected = model.eval()(x)
    assert torch.equal(made(x), expected)
    for parameter in model.parameters():
        parameter.data.fill_(7.0)
    assert torch.equal(made(x), expected)


@pytest.mark.parametrize("whole", [True, False], ids=["the model", "a part"])
def test_a_compiled_model_gives_a_copy_with_weights_of_its_own(whole: bool) -> None:
    model: Any = tiny.TinyModel()
    x = torch.randn(3, 4)
    expected = model.layer(x)
    if whole:
        compiled = torch.compile(model, backend="eager")
    else:
        compiled = model
        model.layer.compile(backend="eager")
        model.further = torch.compile(nn.Linear(4, 4), backend="eager")
    assert torch.equal(compiled.layer(x), expected)
    made = snapshot(compiled)
    for parameter in model.parameters():
        parameter.data.fill_(7.0)
    assert torch.equal(made.layer(x), expected)


def test_a_lazy_model_is_copied_too() -> None:
    model = tiny.TinyModel()
    model.lazy = nn.LazyLinear(2)
    assert snapshot(model).lazy(torch.randn(3, 5)).shape == (3, 2)


def test_a_model_that_cannot_be_copied_is_an_error_that_names_what_is_to_blame() -> None:
    model = tiny.TinyModel()
    model.layer.lock = threading.Lock()
    with pytest.raises(TrainingError, match=r"attribute layer\.lock, a lock"):
        snapshot(model)


def test_a_device_that_is_not_there_is_an_error_that_says_so() -> None:
    for device in ("gpu", "cuda:77", 3.5):
        with pytest.raises(TrainingError, match="is none of this machine"):
            take_snapshot(tiny.TinyModel(), Stage(), device, 1.0, is_training=False)


def test_a_moment_that_does_not_come_is_an_error_and_nothing_is_copied_afterwards() -> None:
    stage = Stage()
    stage.enter(RunState.TRAINING)
    with pytest.raises(TrainingError, match=r"training, and within 0.05 s no batch has ended"):
        take_snapshot(tiny.TinyModel(), stage, "cpu", 0.05, is_training=False)
    model = _NotCopied()
    with pytest.raises(TrainingError, match="no batch has ended"):
        take_snapshot(model, stage, "cpu", 0.05, is_training=False)
    stage.do_tasks()


class _NotCopied(tiny.TinyModel):
    def __deepcopy__(self, memo: Any) -> Any:
        pytest.fail("was copied for nobody")


class OneValue(tiny.TinyModel):
    """Its parameters are all equal, unless it is looked at in the middle of a change."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(float(self.trainer.global_step))
                time.sleep(0.001)
        return 0.0 * super().training_step(batch, batch_idx)


@pytest.mark.process
def test_snapshots_are_of_one_moment_in_every_state(swarm: hivenb.Swarm) -> None:
    model = OneValue(lr=0.0)
    run = hivenb.TrainingRun(
        model, tiny.loader(), swarm=swarm, options=hivenb.Options(target_batch_size=16, run_id="states")
    )

    def value() -> float:
        made = run.snapshot()
        assert not made.training
        assert made._trainer is None
        values = torch.cat([parameter.flatten() for parameter in made.parameters()])
        assert values.min() == values.max()
        return float(values[0])

    run.snapshot()
    run.start()
    run.wait(steps=2)
    seen = [value() for _ in range(20)]
    assert seen == sorted(seen)
    assert seen[-1] > seen[0]
    run.pause()
    run.wait_for("paused")
    assert value() == value()
    run.resume()
    run.wait(steps=2)
    run.stop()
    assert value() >= seen[-1]


@pytest.mark.process
@pytest.mark.parametrize("mode", ["all delays", "offloaded"])
def test_a_snapshot_while_a_callback_validates_with_its_averages_is_what_is_trained(
    mode: str, swarm: hivenb.Swarm
) -> None:
    validates = threading.Event()
    trained: dict[int, list[torch.Tensor]] = {}

    class Watch(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            trained[trainer.global_step] = tiny.parameters(pl_module)

        def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            validates.set()
            time.sleep(0.1)

    run = hivenb.TrainingRun(
        tiny.PacedModel(),
        (tiny.loader(), tiny.loader(32, seed=1)),
        swarm=swarm,
        options=hivenb.Options(target_batch_size=16, run_id=mode.replace(" ", "-"), **tiny.MODES[mode]),
        callbacks=[EMAWeightAveraging(decay=0.9), Watch()],
    )
    run.start()
    for _ in range(2):
        assert validates.wait(60.0)
        validates.clear()
        made = tiny.parameters(run.snapshot())
        assert any(all(map(torch.equal, made, known)) for known in list(trained.values()))
    run.stop()


def test_of_a_model_that_is_ahead_it_has_what_that_would_have_otherwise() -> None:
    model = Attached()
    behind = {model.body.weight: torch.full((4, 4), 0.5), model.layer.bias: torch.zeros_like(model.layer.bias)}
    kept = [one.clone() for one in tiny.parameters(model)]
    made = take_snapshot(model, Stage(), "cpu", 5.0, is_training=True, values_behind=lambda: behind)
    assert made.body.weight.eq(0.5).all()
    assert made.tied.weight is made.body.weight
    assert not made.layer.bias.any()
    assert torch.equal(made.layer.weight, model.layer.weight)
    made.body.weight.fill_(7.0)
    assert behind[model.body.weight].eq(0.5).all()
    assert all(map(torch.equal, tiny.parameters(model), kept))


def test_a_copy_to_go_on_with_keeps_what_it_is() -> None:
    model = tiny.TinyModel()
    made = copy_of(model, CPU)
    assert made.training == model.training
    assert ready_to_predict(made, CPU) is made
