"""Each part of the strategy works on the training that it is given, without the rest of it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hivenb.errors import ProcessEndedError
from hivenb.options.options import Options
from hivenb.strategy import live_changes
from hivenb.strategy.counted_batches import CountedBatches
from hivenb.strategy.fit_without_step import FirstEpoch
from hivenb.strategy.live_changes import Recovery
from hivenb.strategy.rollback import Rollback
from hivenb.strategy.trials import Trials


class Training:
    """As much of one as its parts see."""

    dht: Any = None

    def __init__(self, **options: Any):
        self.options = Options(target_batch_size=64, **options)
        progress = SimpleNamespace(is_last_batch=True)
        trainer = SimpleNamespace(
            fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress)),
            should_stop=False,
            fast_dev_run=False,
            accumulate_grad_batches=1,
            train_dataloader=None,
            callbacks=[],
        )
        self.lightning_module: Any = SimpleNamespace(trainer=trainer, automatic_optimization=True)
        self.precision_plugin: Any = SimpleNamespace()
        trainer.precision_plugin = self.precision_plugin
        self.optimizer: Any = SimpleNamespace(
            local_epoch=3,
            local_progress=SimpleNamespace(samples_accumulated=8),
            grad_averager=SimpleNamespace(ended=None, keep_gradients=lambda: None),
            state_averager=SimpleNamespace(ended=None, epoch_of_parameters=3),
            skipped_batches=SimpleNamespace(in_a_row=0, outlasts=None),
        )
        self.notices: list[str] = []

    def notify(self, mark: str, text: str) -> None:
        self.notices.append(mark)

    def go_on_with(self, optimizer: Any) -> None:
        self.optimizer = optimizer


@pytest.mark.parametrize(("steps", "notices"), [(0, ["the swarm has made no step"]), (1, [])])
def test_a_training_without_a_step_is_noticed(steps: int, notices: list[str]) -> None:
    training = Training()
    first = FirstEpoch(training)
    first.begin()
    for _ in range(2):
        first.see_batch()
    training.optimizer.local_epoch += steps
    first.end(data_is_exhausted=False)
    assert training.notices == notices


class TestRecovery:
    """Of an optimizer one of whose averagers has ended."""

    @pytest.fixture
    def training(self, monkeypatch: pytest.MonkeyPatch) -> Training:
        monkeypatch.setattr(live_changes, "_require", lambda dht, ended: None)
        monkeypatch.setattr(live_changes, "release", lambda optimizer: "what it has")
        monkeypatch.setattr(live_changes, "take_over", lambda handover, make, **settings: make(handover))
        training = Training()
        training.optimizer.dht = None
        return training

    def recovery(self, training: Training) -> Recovery:
        def make(handover: str) -> Any:
            return SimpleNamespace(made_of=handover)

        return Recovery(training, make, training.go_on_with)

    def test_while_nothing_has_ended_there_is_none(self, training: Training) -> None:
        before = training.optimizer
        assert not self.recovery(training).recover()
        assert training.optimizer is before

    def test_a_successor_takes_over_what_it_has(self, training: Training) -> None:
        training.optimizer.grad_averager.ended = ProcessEndedError("it was killed", title="an averager")
        assert self.recovery(training).recover()
        assert training.optimizer.made_of == "what it has"
        assert training.notices == ["an averager was started anew"]

    def test_a_step_that_fails_with_it_is_given_up(self, training: Training) -> None:
        def step(value: int) -> int:
            if training.optimizer is before:
                raise ProcessEndedError("it was killed")
            return value

        before, recovery = training.optimizer, self.recovery(training)
        assert [recovery.recovering(step, 5), recovery.recovering(step, 6)] == [None, 6]


def batches(training: Training, recover: Callable[..., bool] = lambda: False) -> CountedBatches:
    recovery: Any = SimpleNamespace(recover=recover, recovering=lambda step, *args, **kwargs: step(*args, **kwargs))
    return CountedBatches(training, recovery, Rollback(training))


def test_a_batch_weighs_by_its_samples_where_gradients_are_summed_in_the_model() -> None:
    training = Training(reuse_grad_buffers=True)
    counted, weights = batches(training), []
    for samples in (8, 4, 16):
        counted.begin([torch.zeros(samples, 2)])
        loss = torch.zeros((), requires_grad=True)
        counted.weigh(loss)
        loss.backward()
        assert loss.grad is not None
        weights.append(loss.grad.item())
    assert weights == [1.0, 0.5, 2.0]
    assert training.optimizer.grad_averager.samples_of_weight_one == 8


def test_a_batch_that_gives_no_gradient_counts_for_nothing_in_its_step() -> None:
    training = Training()
    counted, said = batches(training), []
    training.precision_plugin.optimizer_step = lambda optimizer, closure, batch_size, model: said.append(batch_size)
    for output in (torch.tensor(1.0), None, torch.tensor(1.0)):
        counted.begin([torch.zeros(8, 2)])
        assert counted.training_step(lambda given: given, output) is output
    counted.optimizer_step(training.optimizer, lambda: None)
    counted.optimizer_step(training.optimizer, lambda: None)
    assert said == [16, 0]


def test_an_auxiliary_peer_computes_nothing() -> None:
    counted = batches(Training(auxiliary=True))
    counted.begin([torch.zeros(8, 2)])
    assert counted.training_step(pytest.fail, "it computes") is None
    assert counted.samples_in_batch == 0


def test_a_rate_that_a_trial_has_found_is_how_the_optimizer_was_set_up() -> None:
    training, set_up = Training(reuse_grad_buffers=True), {"groups": [{"lr": 0.1}]}
    group, did = {"lr": 0.1}, list[str]()
    training.optimizer.opt = SimpleNamespace(param_groups=[group])
    training.optimizer.begin_trial = lambda: did.append("begins")
    training.optimizer.end_trial = lambda: did.append("ends")
    training.optimizer.skipped_batches.note = lambda counts: did.append("notes")
    hooks: Any = SimpleNamespace(
        enable_zero_grad=lambda: did.append("zeroes"), disable_zero_grad=lambda: did.append("keeps")
    )
    trials, trainer = Trials(training, hooks, set_up), training.lightning_module.trainer
    assert trials.begin(trainer), "no callback of the strategy's is there, and the Trainer runs no stage"
    assert trials.are_on
    trials.end()
    group["lr"] = 0.5
    trials.see_barrier("run-stage")
    assert not trials.begin(trainer)
    assert not trials.are_on
    assert set_up == {"groups": [{"lr": 0.5}]}
    assert did == ["begins", "zeroes", "ends", "keeps", "notes"]
