"""Each part of the strategy works on the training that it is given, without the rest of it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from hivenb.errors import ProcessEndedError
from hivenb.options.options import Options
from hivenb.strategy import live_changes
from hivenb.strategy.counted_batches import CountedBatches, SampleCount, sizes_in
from hivenb.strategy.fit_without_step import FirstEpoch
from hivenb.strategy.live_changes import Recovery
from hivenb.strategy.rollback import Rollback
from hivenb.strategy.trials import Trials


class Training:
    """As much of one as its parts see."""

    dht: Any = None

    def __init__(self, **options: Any):
        self.options = Options(target_batch_size=64, **options)
        units: list[int] = []
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
            grad_averager=SimpleNamespace(
                ended=None, keep_gradients=lambda: None, units=units, sum_in_units_of=units.append
            ),
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

    def test_one_that_a_change_has_ended_goes_on_all_the_same(self, training: Training) -> None:
        handover: Any = "what it had"
        assert self.recovery(training).rescue(handover, MemoryError("no room")).made_of == "what it had"

    def test_where_nothing_can_be_made_training_ends_at_its_next_batch_with_the_reason(
        self, training: Training
    ) -> None:
        def make(handover: str) -> Any:
            raise MemoryError("no room")

        recovery, handover = Recovery(training, make, training.go_on_with), cast(Any, "what it had")
        with pytest.raises(ProcessEndedError):
            recovery.rescue(handover, MemoryError("no room"))
        for _ in range(2):  # also where another change comes before the batch
            with pytest.raises(ProcessEndedError, match=r"could not be made anew: no room"):
                recovery.recover()
        training.optimizer = Training().optimizer
        assert not recovery.recover(), "another start begins with nothing of it"

    def test_a_change_that_fails_both_ways_is_handed_to_it(
        self, training: Training, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def take_over(handover: str, make: Any, **settings: Any) -> Any:
            raise MemoryError("no room")

        monkeypatch.setattr(live_changes, "take_over", take_over)
        before, handed = Options(target_batch_size=8), []
        after = before.replace(offload_optimizer=True)
        rescued, error = live_changes.reconfigured(
            cast(Any, training.optimizer), before, after, before.difference(after), cast(Any, None),
            lambda handover, e: handed.append((handover, e)) or cast(Any, "rescued"),
        )  # fmt: skip
        assert rescued == cast(Any, "rescued")
        assert isinstance(error, MemoryError)
        assert [handover for handover, _ in handed] == ["what it has"]

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
        counted.before_backward(loss)
        loss.backward()
        assert loss.grad is not None
        weights.append(loss.grad.item())
    assert weights == [1.0, 0.5, 2.0]
    assert training.optimizer.grad_averager.units == [8, 8, 8]


def steps_of(training: Training, counted: CountedBatches) -> list[int]:
    """Samples of each step, as they count when its closure was called."""
    said: list[int] = []

    def step(optimizer: Any, closure: Any, batch_size: int, model: Any) -> None:
        closure()
        said.append(optimizer.skipped_batches.counted(batch_size))

    training.precision_plugin.optimizer_step = step
    return said


def test_a_batch_that_gives_no_gradient_counts_for_nothing_in_its_step() -> None:
    training = Training()
    counted = batches(training)
    said = steps_of(training, counted)
    for output in (torch.tensor(1.0, requires_grad=True), None, torch.tensor(1.0, requires_grad=True)):
        counted.begin([torch.zeros(8, 2)])
        assert counted.training_step(lambda given: given, output) is output
        if output is not None:
            counted.before_backward(output)
    counted.optimizer_step(training.optimizer, lambda: None)
    counted.optimizer_step(training.optimizer, lambda: None)
    assert said == [16, 0]


def test_each_step_of_a_batch_by_hand_counts_it_and_one_without_a_gradient_nothing() -> None:
    training = Training()
    training.lightning_module.automatic_optimization = False
    counted = batches(training)
    said, loss = steps_of(training, counted), torch.tensor(1.0, requires_grad=True)
    for _ in range(2):
        counted.begin([torch.zeros(8, 2)])  # in parts, as in truncated backpropagation
        for _ in range(3):
            counted.before_backward(loss)
            counted.optimizer_step(training.optimizer, lambda: None)
    counted.begin([torch.zeros(8, 2)])  # which is left out
    counted.begin([torch.zeros(8, 2)])
    counted.before_backward(loss)
    counted.before_backward(loss)  # of two losses
    counted.optimizer_step(training.optimizer, lambda: None)
    counted.begin([torch.zeros(8, 2)])
    counted.optimizer_step(training.optimizer, lambda: None)  # after loss.backward(), of which nobody knows
    assert said == [8] * 6 + [8, 8]


def test_a_batch_counts_whose_gradient_is_computed_in_the_step_and_none_whose_gradient_was_taken_away() -> None:
    training = Training()
    counted = batches(training)
    said, loss = steps_of(training, counted), torch.tensor(1.0, requires_grad=True)
    counted.begin([torch.zeros(8, 2)])
    counted.before_backward(loss)  # accumulated; then the pass ends
    counted.begin([torch.zeros(4, 2)])

    def closure() -> None:
        counted.begin_anew()  # as zero_grad() does before the first batch of a group
        counted.before_backward(loss)

    counted.optimizer_step(training.optimizer, closure)
    counted.begin([torch.zeros(2, 2)])
    counted.optimizer_step(training.optimizer, lambda: None)  # its training step has returned None
    assert said == [4, 0]


def test_numbers_that_are_in_no_tensor_are_not_looked_at_one_by_one() -> None:
    looked = []

    class Rows(list):
        def __iter__(self) -> Any:
            looked.append(len(self))
            return super().__iter__()

    large = {"mask": np.zeros((64, 64, 64)), "raw": bytes(100_000), "x": torch.zeros(3, 2), "ids": Rows([1] * 50)}
    assert list(sizes_in(large)) == [None, None, 3] + [None] * 50
    count = SampleCount()
    count.look_at(large, None)
    assert count.in_batch == 3
    looked.clear()
    count.look_at(large, None)  # of later batches only the first tensor
    assert looked == []


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
