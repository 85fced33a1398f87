"""What a cell does with the model of a run that trains, and what the training sees of it."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import lightning
import pytest
import tiny
import torch
from torch import nn

import hivenb
from hivenb.errors import TrainingError
from hivenb.run.module_modes import KeptModes


class Modes(tiny.PacedModel):
    """Notes in which modes its parts are in each batch; one of them is frozen on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.frozen = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.seen: list[tuple[bool, ...]] = []

    def train(self, mode: bool = True) -> Modes:
        super().train(mode)
        self.frozen.eval()
        return self

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append((self.training, self.norm.training, self.frozen.training, self.layer.weight.requires_grad))
        return super().training_step((self.norm(batch[0]), batch[1]), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert not self.training


def in_a_cell(action: Callable[[], Any]) -> Any:
    """What something gives, or raises, on a thread that does not train."""
    results: list[Any] = []

    def work() -> None:
        try:
            results.append(action())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return results[0]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def model(said: list[str]) -> Modes:
    return Modes().train()


@pytest.fixture
def modes(model: Modes, said: list[str]) -> Any:
    kept = KeptModes(said.append)
    kept.begin(model)
    yield kept
    kept.end()
    assert not {"train", "_apply", "requires_grad_", "freeze"} & set(vars(model)) | set(vars(model.norm)) & {"train"}


@pytest.mark.parametrize(
    "action",
    [
        lambda model: model.eval(),
        lambda model: model.norm.eval(),
        lambda model: model.train(False),
        lambda model: model.requires_grad_(False),
        lambda model: model.layer.requires_grad_(False),
        lambda model: model.freeze(),
    ],
    ids=["eval", "eval of a part", "train(False)", "requires_grad_", "requires_grad_ of a part", "freeze"],
)
def test_what_a_cell_asks_of_the_model_changes_nothing_and_is_said_once(
    action: Callable[[Modes], Any], model: Modes, modes: KeptModes, said: list[str]
) -> None:
    for _ in range(2):
        assert not isinstance(in_a_cell(lambda: action(model)), Exception)
    assert (model.training, model.norm.training, model.frozen.training) == (True, True, False)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert len(said) == 1


def test_a_chain_of_calls_in_a_cell_gives_the_model(model: Modes, modes: KeptModes) -> None:
    assert in_a_cell(lambda: model.eval().cpu().requires_grad_(False)) is model


def test_asking_for_what_is_so_already_is_not_worth_a_word(model: Modes, modes: KeptModes, said: list[str]) -> None:
    in_a_cell(lambda: (model.train(), model.requires_grad_(), model.cpu(), model.float()))
    assert said == []
    assert model.frozen.training is False


@pytest.mark.parametrize("cast", ["half", "double", "bfloat16"])
def test_a_cell_cannot_cast_what_is_trained(cast: str, model: Modes, modes: KeptModes) -> None:
    error = in_a_cell(lambda: getattr(model, cast)())
    assert isinstance(error, TrainingError)
    assert "run.snapshot" in str(error)
    assert model.dtype is model.layer.weight.dtype is torch.float32
    assert isinstance(in_a_cell(lambda: model.layer.to(torch.float64)), TrainingError)
    model.to(torch.float64)  # as a precision plugin does, on the training thread
    assert isinstance(in_a_cell(lambda: model.float()), TrainingError)
    assert model.dtype is model.layer.weight.dtype is torch.float64


def test_another_trainer_is_refused_though_a_batch_has_begun_since_it_took_the_model(
    model: Modes, modes: KeptModes
) -> None:
    ours, theirs = (lightning.Trainer(**tiny.QUIET) for _ in range(2))
    model.trainer = ours
    modes.see_trainer(ours)
    model.trainer = theirs
    modes.before_batch()
    error = in_a_cell(lambda: model.eval())
    assert isinstance(error, TrainingError)
    assert "another Trainer" in str(error)
    assert model.trainer is ours
    assert in_a_cell(lambda: model.eval()) is model


def test_the_training_thread_does_with_its_modes_what_it_likes(model: Modes, modes: KeptModes) -> None:
    model.norm.eval()
    modes.before_batch()
    in_a_cell(lambda: model.train())
    assert (model.norm.training, model.frozen.training) == (False, False)
    model.eval()  # somebody wants to train like this
    modes.before_batch()
    assert not model.training
    model.train()
    assert model.norm.training
    assert not model.frozen.training


def test_flags_that_are_set_by_hand_are_put_back_before_the_next_batch(model: Modes, modes: KeptModes) -> None:
    model.norm.eval()
    modes.before_batch()

    def set_flags() -> None:
        for module in model.modules():
            module.training = False

    in_a_cell(set_flags)
    modes.before_batch()
    assert (model.training, model.layer.training, model.norm.training) == (True, True, False)


def test_a_model_that_is_handed_out_is_anybodys_and_comes_back_as_it_was(model: Modes, modes: KeptModes) -> None:
    modes.hand_out()
    in_a_cell(lambda: (model.eval(), model.requires_grad_(False)))
    assert not model.training
    assert not model.norm.training
    model.requires_grad_()
    modes.take_back()
    assert (model.training, model.norm.training, model.frozen.training) == (True, True, False)
    modes.hand_out()
    in_a_cell(lambda: model.norm.eval())  # a part: somebody wants to freeze its statistics
    modes.take_back()
    assert model.training
    assert not model.norm.training


def test_a_model_in_eval_mode_is_trained_as_it_was_before_and_a_part_stays_as_somebody_left_it(said: list[str]) -> None:
    kept, model = KeptModes(said.append), Modes()
    model.eval()
    kept.begin(model)
    assert model.norm.training
    assert not model.frozen.training
    model.norm.eval()
    kept.end()
    model.eval()
    kept.begin(model)  # as it was in training last
    assert model.training
    assert not model.norm.training
    kept.end()
    model.train()
    model.layer.eval()
    kept.begin(model)
    assert model.norm.training
    assert not model.layer.training
    kept.end()


def test_copies_of_a_model_that_is_trained_are_anybodys(model: Modes, modes: KeptModes, said: list[str]) -> None:
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        in_a_cell(lambda made=made: made.eval().half())
        assert not made.training
        assert not made.norm.training
        assert made.layer.weight.dtype is torch.float16
        assert made.train().norm.training
        assert not made.frozen.training
    assert model.training
    assert said == []


def test_a_run_trains_in_its_modes_whatever_cells_do(swarm: hivenb.Swarm) -> None:
    model = Modes()
    validation = tiny.loader(32, seed=1)
    run = hivenb.TrainingRun(
        model, (tiny.loader(), validation), swarm=swarm, options=hivenb.Options(target_batch_size=16)
    )
    model.eval()
    run.start()
    run.wait(steps=4)
    model.eval()
    model.norm.eval()
    model.requires_grad_(False)
    with pytest.raises(TrainingError, match="snapshot"):
        lightning.Trainer(**tiny.QUIET).validate(model, validation, verbose=False)
    run.wait(steps=12)
    run.pause()
    run.wait_for("paused")
    model.eval()
    assert not model.training
    run.resume()
    run.wait(steps=4)
    run.stop()
    model.eval()
    run.start()
    run.wait(steps=4)
    run.stop()
    assert set(model.seen) == {(True, True, False, True)}
    assert any("run.snapshot()" in line for line in run.log_lines)
    assert any("eval mode" in event.text for event in run.history.snapshot().events)
