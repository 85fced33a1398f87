"""What the Trainer reports while it trains, written into the history."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from hivenb.engine.optimizer.skipped_batches import SkipsBatches
from hivenb.figures.history import History
from hivenb.figures.loss_rises import LEARNING_RATE
from hivenb.figures.metric_names import is_of_validation
from hivenb.strategy.counted_batches import count_samples

if TYPE_CHECKING:
    from hivenb.engine.optimizer.scheduled_rounds import EpochReport

#: Seconds between two points of the training loss. Reading a loss waits for the device, so it is not done each step.
LOSS_INTERVAL = 0.1

#: Seconds after which a pass over the data takes long.
LONG_PASS = 30.0

#: Seconds between two marks on batches that were skipped.
MARK_INTERVAL = 10.0


class Recorder(Callback):
    """Lightning callback that records the loss and the user's metrics.

    The training loss is the mean over all batches since the last point whose loss is finite. Of what the module logs,
    validation figures are recorded after each validation, and all others after each pass over the data: means, where it
    logs them for each batch. In a pass that takes long, the values of batches are recorded in place of their mean.

    :param history: where to write
    """

    def __init__(self, history: History):
        self._history = history
        self._losses: torch.Tensor | None = None
        self._rate: float | None = None
        self._has_rates = False
        self._next_flush = 0.0
        self._skipped_before = self._unmarked = self._in_a_row = 0
        self._refused: set[str] = set()
        self._next_mark = 0.0
        #: of each metric of training, what was recorded last
        self._recorded: dict[str, torch.Tensor] = {}
        #: when this pass began, and the metrics of which values of batches were recorded in it
        self._pass_began, self._of_batches = 0.0, set[str]()
        self._why_buffers_skipped: str | None = None
        self.steps = 0
        self.samples = 0
        self.epoch = 0
        #: of the swarm that have passed while the run trained; it may join, or go on, at a later one
        self.epochs = 0
        #: batches that count for nothing, as their gradients were not finite
        self.skipped_batches = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._skipped_before = 0  # its optimizer is a new one
        self._recorded = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps += 1
        self.samples += _samples(trainer, batch)
        self._see_skipped(trainer)
        self._look_at_buffers(trainer.strategy)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not torch.is_tensor(loss):
            return  # manual optimization may return nothing; what the module logs is recorded all the same
        # Lightning divides it by the number of batches whose gradients it sums up
        divisor = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        loss = divisor * loss.detach().float().mean()
        is_finite = loss.isfinite()
        # their sum and their number, on the device: one that is not finite would be the mean of all
        one = torch.stack([torch.where(is_finite, loss, 0.0), is_finite.float()])
        self._losses = one if self._losses is None else self._losses + one
        if time.monotonic() >= self._next_flush:
            self._flush_loss()
            self._see_learning_rate(trainer)
            if time.monotonic() - self._pass_began >= LONG_PASS:
                self._record_training_metrics(trainer, in_pass=True)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._record_training_metrics(trainer)  # those that the module has logged at the end of the pass before
        self._pass_began, self._of_batches = time.monotonic(), set()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._flush_loss()
        self._record_training_metrics(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._record_training_metrics(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._next_mark = 0.0  # those that have ended the run are to be seen
        self._see_skipped(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            for name, value in trainer.callback_metrics.items():
                if (metric := _plain_name(name)) is not None and is_of_validation(metric):
                    self._record(metric, float(value))

    def on_epoch(self, report: EpochReport) -> None:
        """Take over a new swarm epoch; failed rounds, and peers refused in one, become marks on the charts."""
        # more than one, where it has fallen behind and caught up; not where it has joined late
        self.epochs += max(1, report.epoch - self.epoch) if self.epoch else 1
        self.epoch = report.epoch
        in_vain = 0.0 if report.failed is None else report.seconds
        for name, value in (
            ("stalled_seconds", report.seconds),
            ("waiting_seconds", in_vain),
            ("group_size", report.group_size),
        ):
            self._record(name, value)
        if report.failed is not None:
            self._history.mark("round", f"round failed in epoch {report.epoch}: {report.failed}")
        for peer, reason in report.refused.items():
            if peer not in self._refused:  # once: one that goes on with it is excluded time and again
                self._refused.add(peer)
                self._history.mark("round", f"{peer} excluded in epoch {report.epoch}: {reason}")

    def _look_at_buffers(self, strategy: Any) -> None:
        """Mark on the charts, once, that the module's buffers are skipped."""
        averager = getattr(getattr(strategy, "optimizer", None), "state_averager", None)
        why = getattr(averager, "why_buffers_skipped", None)
        if why is not None and why != self._why_buffers_skipped:
            self._why_buffers_skipped = why
            self._history.mark("round", f"buffers {why}")

    def _flush_loss(self) -> None:
        if self._losses is not None:
            total, count = self._losses.tolist()
            self._record("loss", total / count if count else math.nan)  # a gap
        self._losses = None
        self._next_flush = time.monotonic() + LOSS_INTERVAL

    def _see_learning_rate(self, trainer: Any) -> None:
        """Record the largest learning rate where it changes: a loss that rises with it rises for its sake."""
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        rate = max((float(group["lr"]) for group in groups if "lr" in group), default=None)
        before, self._rate = self._rate, rate
        if rate is not None and before is not None and rate != before:
            if not self._has_rates:
                self._has_rates = True
                self._record(LEARNING_RATE, before)
            self._record(LEARNING_RATE, rate)

    def _see_skipped(self, trainer: Any) -> None:
        optimizer = getattr(trainer.strategy, "optimizer", None)
        if not isinstance(optimizer, SkipsBatches):
            return
        count = optimizer.skipped_batches
        if new := count.total - self._skipped_before:
            self.skipped_batches, self._skipped_before = self.skipped_batches + new, count.total
            self._unmarked += new
            self._record("skipped_batches", self.skipped_batches)
        if count.in_a_row != self._in_a_row:
            self._in_a_row = count.in_a_row
            self._record("skipped_in_a_row", count.in_a_row)
        if self._unmarked and time.monotonic() >= self._next_mark:
            which = f"batch {self.steps}" if self._unmarked == 1 else f"{self._unmarked} batches"
            self._history.mark("batch", f"{which} skipped: gradients not finite")
            self._unmarked, self._next_mark = 0, time.monotonic() + MARK_INTERVAL

    def _record_training_metrics(self, trainer: Any, in_pass: bool = False) -> None:
        """Record what the module has logged since the last time. Lightning keeps what it was before as well.

        :param in_pass: in the middle of a pass, where what is logged per step and per epoch has the value of a step
        """
        metrics = trainer.callback_metrics
        for name, value in metrics.items():
            metric = _plain_name(name)
            if metric is None or is_of_validation(metric) or (in_pass and f"{metric}_step" in metrics):
                continue
            value, last = torch.as_tensor(value), self._recorded.get(metric)
            # one that is kept has its memory, which no other one can have
            if last is not None and value.data_ptr() == last.data_ptr():
                continue
            self._recorded[metric] = value
            if in_pass:
                self._of_batches.add(metric)
            if in_pass or metric not in self._of_batches:
                self._record(metric, float(value))

    def _record(self, name: str, value: float) -> None:
        self._history.record(name, value, epoch=self.epoch, samples=self.samples)


def _plain_name(name: str) -> str | None:
    """The name by which a module has logged a metric; ``None`` for the loss, and for what another name stands for.

    Lightning adds ``_step`` and ``_epoch`` when a metric is logged per step and per epoch.
    """
    if name.endswith("_step"):
        return None
    metric = name.removesuffix("_epoch")
    return None if metric == "loss" else metric


def _samples(trainer: Any, batch: Any) -> int:
    """What the strategy has counted for a batch before a training step could take it apart.

    With any other strategy, what is left of it; 0 where that cannot be told, as nothing there depends on it.
    """
    if batch is None:  # Lightning leaves it out
        return 0
    counted: int | None = getattr(trainer.strategy, "samples_in_batch", None)
    if counted is not None:
        return counted
    try:
        return count_samples(batch)
    except MisconfigurationException:
        return 0
