from __future__ import annotations

import math
from types import SimpleNamespace

import lightning
import pytest
import tiny
import torch

from hivenb.engine.optimizer.scheduled_rounds import EpochReport
from hivenb.engine.optimizer.skipped_batches import SkippedBatches, SkipsBatches
from hivenb.history import History
from hivenb.run import recorder as recorder_module
from hivenb.run.recorder import Recorder


class Logging(tiny.TinyModel):
    """Logs in all the ways that Lightning has."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        self.log("accuracy", 0.5, on_step=True, on_epoch=True)
        self.log("rate", 0.1)
        return {"loss": loss, "more": 1}

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", torch.tensor(2.0))
        self.log("val_acc", 0.25, on_step=True, on_epoch=True)


class Counting(SkipsBatches):
    """An optimizer of which no more than its count is looked at."""

    def __init__(self):
        pass

    def __del__(self):
        pass


def record(model, **kwargs) -> tuple[Recorder, History]:
    history = History()
    recorder = Recorder(history)
    trainer = lightning.Trainer(callbacks=[recorder], **{"max_epochs": 2, **tiny.QUIET, **kwargs})
    trainer.fit(model, tiny.loader(), tiny.loader(seed=1))
    return recorder, history


def test_it_records_what_a_module_logs():
    recorder, history = record(Logging())
    snapshot = history.snapshot()
    assert set(snapshot.series) == {"loss", "accuracy", "rate", "val_loss", "val_acc"}
    assert recorder.steps == 16
    assert snapshot.last("val_loss") == 2.0
    assert snapshot.last("val_acc") == 0.25
    assert snapshot.last("accuracy") == 0.5
    assert len(snapshot.series["val_loss"].values) == 2
    assert len(snapshot.series["rate"].values) == 2
    assert snapshot.last("loss") < snapshot.series["loss"].values[0]
    assert recorder.samples == 2 * 64
    assert snapshot.series["val_loss"].samples.tolist() == [64, 128]
    assert snapshot.series["loss"].samples[-1] == 128


class Named(tiny.TinyModel):
    """Logs under names that begin as those of validation do."""

    def training_step(self, batch, batch_idx):
        self.log_dict({"value_loss": 1.0, "valves": 2.0})
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log_dict({"val/acc": 3.0, "validation_loss": 4.0, "valid_f1": 5.0, "val": 6.0})


class AtTheEnd(tiny.TinyModel):
    """Logs what a pass came to when it is over, as is done with torchmetrics."""

    passes = 0

    def on_train_epoch_end(self):
        self.passes += 1
        self.log("passes", float(self.passes))
        self.log("always", 1.0)


def test_what_a_module_logs_at_the_end_of_a_pass_is_recorded_with_that_pass():
    _, history = record(AtTheEnd(), max_epochs=3)
    series = history.snapshot().series
    assert series["passes"].values.tolist() == [1.0, 2.0, 3.0]
    assert series["passes"].samples.tolist() == [64, 128, 192]
    assert series["always"].values.tolist() == [1.0] * 3


class InAnEndlessPass(tiny.TinyModel):
    """Logs for each batch, and both for a batch and for a pass that never ends."""

    def training_step(self, batch, batch_idx):
        self.log("batch", float(batch_idx))
        self.log("both", float(batch_idx), on_step=True, on_epoch=True)
        if batch_idx % 4 == 0:
            self.log("seldom", float(batch_idx))
        return super().training_step(batch, batch_idx)


def test_what_is_logged_for_a_batch_does_not_wait_for_the_end_of_a_pass(monkeypatch):
    _, history = record(InAnEndlessPass(), max_epochs=1)
    assert history.snapshot().series["batch"].values.tolist() == [3.5], "the mean of a short pass"
    monkeypatch.setattr(recorder_module, "LOSS_INTERVAL", 0.0)
    monkeypatch.setattr(recorder_module, "LONG_PASS", 0.0)
    _, history = record(InAnEndlessPass(), max_epochs=1)
    series = history.snapshot().series
    assert series["batch"].values.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert series["seldom"].values.tolist() == [0.0, 4.0], "once each"
    assert series["both"].values.tolist() == [3.5], "the mean of the pass, and no batch"
    _, history = record(AtTheEnd(), max_epochs=3)
    assert history.snapshot().series["passes"].values.tolist() == [1.0, 2.0, 3.0], "which no batch has logged"


def test_a_metric_is_of_validation_if_its_first_word_says_so():
    _, history = record(Named(), limit_val_batches=0)
    assert set(history.snapshot().series) == {"loss", "value_loss", "valves"}
    _, history = record(Named())
    assert {"val/acc", "validation_loss", "valid_f1", "val"} <= set(history.snapshot().series)


class AlwaysOne(tiny.TinyModel):
    """Its loss is one."""

    def training_step(self, batch, batch_idx):
        return 0 * super().training_step(batch, batch_idx) + 1


def test_the_loss_is_that_of_the_module_however_many_batches_are_a_step():
    _, history = record(AlwaysOne(), accumulate_grad_batches=4)
    assert set(history.snapshot().series["loss"].values) == {1.0}


def test_the_first_loss_is_that_of_the_first_batch():
    model = tiny.TinyModel()
    with torch.no_grad():
        expected = model.training_step(next(iter(tiny.loader())), 0).item()
    _, history = record(model)
    assert history.snapshot().series["loss"].values[0] == pytest.approx(expected)


def test_a_check_before_training_is_not_recorded():
    _, history = record(Logging(), num_sanity_val_steps=1)
    assert len(history.snapshot().series["val_loss"].values) == 2


def test_manual_optimization_without_a_loss_still_counts_steps():
    class Manual(tiny.TinyModel):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            return None

        def validation_step(self, batch, batch_idx):
            return None

    model = Manual()
    model.automatic_optimization = False
    recorder, history = record(model)
    assert recorder.steps == 16
    assert "loss" not in history.snapshot().series


def test_a_loss_that_is_no_number_is_recorded_without_an_end_of_training():
    class Diverged(tiny.TinyModel):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * math.nan

    recorder, history = record(Diverged())
    assert recorder.steps == 16
    assert math.isnan(history.snapshot().last("loss") or math.nan)


def test_one_loss_that_is_no_number_is_not_the_mean_of_all(monkeypatch):
    class Stumbling(tiny.TinyModel):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * 0 + (math.nan if batch_idx in (2, 3) else batch_idx)

    monkeypatch.setattr(recorder_module, "LOSS_INTERVAL", 1000.0)
    _, history = record(Stumbling(), limit_train_batches=6)
    # the first batch, the rest of the first pass, and the second pass
    assert list(history.snapshot().series["loss"].values) == pytest.approx([0, 10 / 3, 10 / 4])


def test_batches_that_are_skipped_are_counted_and_marked_once_in_a_while():
    history = History()
    recorder = Recorder(history)
    optimizer = Counting()
    trainer = SimpleNamespace(strategy=SimpleNamespace(optimizer=optimizer))
    for start in range(2):
        optimizer.skipped_batches = SkippedBatches()
        recorder.on_train_start(trainer, None)
        for is_good in (True, False, False, False, True):
            if is_good:
                optimizer.skipped_batches.take()
            else:
                optimizer.skipped_batches.skip("nan", "Lost")
            recorder.on_train_batch_end(trainer, None, None, (torch.ones(4),), 0)
        assert recorder.skipped_batches == 3 * (start + 1)
    recorder.on_exception(trainer, None, RuntimeError())
    snapshot = history.snapshot()
    assert list(snapshot.series["skipped_batches"].values) == [1, 2, 3, 4, 5, 6]
    assert list(snapshot.series["skipped_in_a_row"].values) == [1, 2, 3, 0] * 2
    assert [(event.kind, event.text) for event in snapshot.events] == [
        ("batch", "batch 2 skipped: gradients not finite"),
        ("batch", "5 batches skipped: gradients not finite"),
    ]


def test_epochs_that_passed_before_a_run_joined_are_not_counted_and_those_that_it_has_missed_are():
    recorder = Recorder(History())
    recorder.epoch = 50  # where it has joined
    for epoch in (51, 52, 55):
        recorder.on_epoch(EpochReport(epoch=epoch, samples=64, group_size=2, seconds=0.5))
    assert (recorder.epoch, recorder.epochs) == (55, 5)


def test_an_epoch_of_the_swarm_becomes_points_and_a_failed_round_a_mark():
    history = History()
    recorder = Recorder(history)
    recorder.on_epoch(EpochReport(epoch=3, samples=64, group_size=2, seconds=0.5))
    recorder.on_epoch(EpochReport(epoch=4, samples=64, group_size=1, seconds=1.5, failed="nobody came"))
    snapshot = history.snapshot()
    assert recorder.epoch == 4
    assert list(snapshot.series["group_size"].values) == [2, 1]
    assert list(snapshot.series["group_size"].epochs) == [3, 4]
    assert list(snapshot.series["stalled_seconds"].values) == [0.5, 1.5]
    assert list(snapshot.series["waiting_seconds"].values) == [0, 1.5]
    assert [(event.kind, event.text) for event in snapshot.events] == [
        ("round", "round failed in epoch 4: nobody came")
    ]


def test_why_buffers_are_skipped_is_marked_once():
    history = History()
    recorder = Recorder(history)
    averager = SimpleNamespace(why_buffers_skipped=None)
    strategy = SimpleNamespace(optimizer=SimpleNamespace(state_averager=averager), options=None)
    for why in (None, *["not averaged: a peer has none"] * 2):
        averager.why_buffers_skipped = why
        recorder.on_train_batch_end(SimpleNamespace(strategy=strategy), None, None, [torch.zeros(2)], 0)
    assert [event.text for event in history.snapshot().events] == ["buffers not averaged: a peer has none"]


def test_the_epochs_of_a_swarm_that_was_joined_late_are_not_those_of_this_peer():
    recorder = Recorder(History())
    recorder.on_epoch(EpochReport(51, 10, 2, 0.1))
    assert recorder.epochs == 1
    recorder.on_epoch(EpochReport(54, 10, 2, 0.1))
    assert recorder.epochs == 4


class TakesApart(tiny.TinyModel):
    """Takes what it needs out of its batches, which are dicts."""

    def training_step(self, batch, batch_idx):
        return super().training_step((batch.pop("x"), batch.pop("y")), batch_idx)


def some_are_none(examples):
    batch = torch.utils.data.default_collate(examples)
    some_are_none.calls += 1
    return None if some_are_none.calls % 2 else {"x": batch[0], "y": batch[1]}


def test_a_batch_that_is_none_or_was_taken_apart_has_no_samples_to_count_anew():
    some_are_none.calls = 0
    data = torch.utils.data.DataLoader(tiny.loader().dataset, batch_size=8, collate_fn=some_are_none)
    recorder = Recorder(History())
    lightning.Trainer(callbacks=[recorder], max_epochs=1, **tiny.QUIET).fit(TakesApart(), data)
    assert (recorder.steps, recorder.samples) == (8, 0)


@pytest.mark.parametrize(("batch", "samples"), [({}, 24), (None, 0)], ids=["taken apart", "None"])
def test_what_the_strategy_has_counted_counts(batch, samples):
    recorder = Recorder(History())
    trainer = SimpleNamespace(strategy=SimpleNamespace(samples_in_batch=24, optimizer=None))
    recorder.on_train_batch_end(trainer, None, None, batch, 0)
    assert recorder.samples == samples
