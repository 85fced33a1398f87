"""Batches whose gradients are not finite: skipped where they are made, counted, said, and in the end an error.

One that gives no gradient at all is passed over without a word: somebody has decided so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import hivemind
import torch
from hivemind.utils import get_logger

from hivenb.engine.averaging.finite import are_finite, can_be_judged_late, where_not_finite
from hivenb.engine.averaging.gradient_averager import Unjudged
from hivenb.errors import NotFiniteError

logger = get_logger(__name__)

#: Batches in a row without one that counts, with which training ends: it learns nothing, and the others wait for it.
MOST_IN_A_ROW = 16

#: Seconds between two lines in the log on batches that were skipped.
SAY_AGAIN_AFTER = 10.0

#: The scale of losses from which on a scaler finds by itself one with which gradients in half precision are finite.
#: Batches that it costs are no sign that anything is wrong.
NO_SCALE = 1.0


class SkippedBatches:
    """The count of the batches that one peer skips in a training. For the thread that trains.

    :param now: a clock, in seconds
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._said_at, self._unsaid = -SAY_AGAIN_AFTER, 0
        #: steps that have brought gradients, finite or not
        self.seen = 0
        #: steps that were made at all
        self.calls = 0
        #: those that were skipped
        self.total = 0
        #: those that were skipped since the last one that was not, but for those that the scale of the losses has cost
        self.in_a_row = 0
        #: gives the scale by which losses, and so gradients, are multiplied at the moment
        self.scale: Callable[[], float] = lambda: NO_SCALE
        #: gives the samples that count of those that a step is said to have: none if its batch has given no gradient
        self.counted: Callable[[int], int] = lambda said: said
        #: whether training goes on with none that counts: the others may be about to bring a good state back
        self.outlasts: Callable[[], bool] = lambda: False
        #: called with True before the first batch and after each step, and with False after a batch that is skipped;
        #: ``None`` where nobody minds a batch that is skipped when the next one has been computed
        self.on_batch: Callable[[bool], None] | None = None

    def note(self, counts: bool) -> None:
        """Tell who has to know that a batch, or a step, counts or not."""
        if self.on_batch is not None:
            self.on_batch(counts)

    def bring(self) -> None:
        """Note a step that has brought gradients; what is said of them next is of these."""
        self.seen += 1

    def take(self) -> None:
        """Note that the batch counts."""
        self.in_a_row = 0

    def skip(self, where: str, lost: str) -> None:
        """Note that the batch does not count.

        :param where: its gradients are not finite, in words
        :param lost: what is not counted with it, in words
        :raises NotFiniteError: if there were too many in a row, and nothing is to come that ends that
        """
        self.total += 1
        self._unsaid += 1
        self.note(False)
        scale = self.scale()
        if scale <= NO_SCALE:
            self.in_a_row += 1
        if self.in_a_row >= MOST_IN_A_ROW and not self.outlasts():
            raise NotFiniteError(
                f"{self.in_a_row} batches in a row had gradients that are not finite, the last of them batch "
                f"{self.seen} of this training ({where}). They were skipped, so the model is as good as before them, "
                f"but nothing is learned any more. {NotFiniteError.REMEDY}."
            )
        if self._now() - self._said_at >= SAY_AGAIN_AFTER:
            scaled = f" at a loss scale of {scale:g}" if scale > NO_SCALE else ""
            others = f"; {self._unsaid} since this was said last" if self._unsaid > 1 else ""
            remedy = f" It is one of {self.in_a_row} in a row. {NotFiniteError.REMEDY}." if self.in_a_row > 1 else ""
            logger.warning(f"Batch {self.seen} is skipped: {where}{scaled}. {lost}{others}.{remedy}")
            self._said_at, self._unsaid = self._now(), 0


class SkipsBatches(hivemind.Optimizer):
    """Base to put *before* ``hivemind.Optimizer``: a batch with gradients that are not finite counts for nothing.

    What it would do to the model could not be undone: hivemind sums it up, and averages the sum with the others'.
    """

    def __init__(self, **kwargs: Any):
        #: what this peer has skipped; a successor goes on with it
        self.skipped_batches = SkippedBatches()
        self._unjudged: Unjudged | None = None
        super().__init__(**kwargs)

    def step_on_batch(
        self, closure: Callable[[], Any] | None = None, batch_size: int | None = None, grad_scaler: Any = None
    ) -> Any:
        """As the step of ``hivemind.Optimizer``, but for a batch that counts for nothing."""
        self.skipped_batches.calls += 1
        if self.auxiliary or self.use_gradient_averaging:
            return super().step(closure, batch_size, grad_scaler)
        # with local updates, hivemind/optim/optimizer.py:step goes from the closure right to the step of the optimizer
        self.state_averager.step(apply_delayed_updates=True)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        batch_size = self.batch_size_per_step if batch_size is None else batch_size
        if batch_size is not None and not (batch_size := self.skipped_batches.counted(batch_size)):
            self._go_on_without_a_batch()
            return loss
        self.skipped_batches.bring()
        if self._is_to_be_skipped(None, (parameter.grad for parameter in self.state_averager.main_parameters)):
            lost = f"Its {batch_size} samples do not count, and no step was made"
            self.skipped_batches.skip(self._where_not_finite(), lost)
            self._go_on_without_a_batch()
            return loss
        return super().step(None if closure is None else lambda: loss, batch_size, grad_scaler)

    def _check_and_accumulate_gradients(self, batch_size: int, grad_scaler: Any) -> bool:
        # hivemind's own looks at scaled gradients alone. The step goes on in either case, as the others may be done
        # with their samples, and wait for this peer
        self.settle()
        batch_size = self.skipped_batches.counted(batch_size)
        if not batch_size:
            return True
        self.skipped_batches.bring()
        gradients = self.grad_averager.gradients()
        if grad_scaler is None and self._can_judge_late(gradients):
            self._unjudged = self.grad_averager.accumulate_if_finite_(batch_size)
            self._report_samples()
            return True
        if not self._is_to_be_skipped(grad_scaler, gradients):
            self.grad_averager.accumulate_grads_(batch_size)
            self._report_samples()
            return True
        averager, where = self.grad_averager, self._where_not_finite()
        lost = f"Its {batch_size} samples do not count"
        if averager.reuse_grad_buffers:
            lost += f", nor do {averager.local_samples_accumulated} before it: with reuse_grad_buffers they are one sum"
            averager.reset_accumulated_grads_()
            self.tracker.report_local_progress(self.local_epoch, 0)
        # else there is nothing to report: the time that it took is that of the next one, and so is this peer's speed
        self.skipped_batches.skip(where, lost)
        return True

    def settle(self) -> bool:
        """Know whether the batch before counts, which a GPU is asked beside computing, and say so if it does not.

        To be called where the samples of this peer matter; waits for the GPU only if it has not come so far.

        :returns: whether it does
        :raises NotFiniteError: if there were too many in a row that do not
        """
        batch, self._unjudged = self._unjudged, None
        if batch is None:
            return True
        if batch.verdict:
            self.skipped_batches.take()
            return True
        self.grad_averager.take_back(batch)
        self._report_samples()
        self.skipped_batches.skip(batch.verdict.where(), f"Its {batch.samples} samples do not count")
        return False

    def _can_judge_late(self, gradients: Sequence[torch.Tensor]) -> bool:
        if self.skipped_batches.on_batch is not None or self.grad_averager.reuse_grad_buffers:
            return False  # the batch has spoiled already what it is to be taken out of
        return can_be_judged_late(gradients)

    def _report_samples(self) -> None:
        self.tracker.report_local_progress(self.local_epoch, self.grad_averager.local_samples_accumulated)

    def _is_to_be_skipped(self, grad_scaler: Any, gradients: Iterable[torch.Tensor | None]) -> bool:
        # a scaler of hivemind's keeps what it finds, to lower the scale
        is_finite = are_finite(gradients) if grad_scaler is None else grad_scaler.are_grads_finite(self)
        if is_finite:
            self.skipped_batches.take()
        return not is_finite

    def _where_not_finite(self) -> str:
        return where_not_finite(parameter.grad for parameter in self.state_averager.main_parameters)

    def _go_on_without_a_batch(self) -> None:
        if self._should_load_state_from_peers():
            self.load_state_from_peers()
            return
        self._maybe_schedule_state_averaging()
        if self.tracker.ready_to_update_epoch:
            self._update_global_epoch(None)


# -- grad scaler -----------------------------------------------------------------------------------------------------
#
# Scaling of gradients in half precision that goes with the way in which hivemind accumulates them.


class GradScaler(hivemind.GradScaler):
    """``hivemind.GradScaler`` that hands on what ``step`` is given, such as the number of samples."""

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(optimizer, hivemind.Optimizer):  # called by hivemind, for the torch optimizer within
            return super().step(optimizer, *args, **kwargs)
        if isinstance(optimizer, SkipsBatches):
            optimizer.skipped_batches.scale = self.get_scale
        # hivemind/optim/grad_scaler.py:step calls the optimizer with no arguments
        result = optimizer.step(*args, grad_scaler=self, **kwargs)
        self._optimizer_states_to_reset.add(id(optimizer))
        return result

    def pass_over(self, optimizer: Any) -> None:
        """Let an optimizer of the swarm end an epoch that is over, after a batch that has given no gradient."""
        self.step(optimizer, batch_size=0)
        self.update()


class GradScalerOfBatches(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` that hands each batch to the swarm's optimizer, which skips those it has to."""

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(optimizer, SkipsBatches):
            return super().step(optimizer, *args, **kwargs)
        optimizer.skipped_batches.scale = self.get_scale
        calls = optimizer.skipped_batches.calls
        result = super().step(optimizer, *args, **kwargs)
        if optimizer.skipped_batches.calls == calls:
            # torch does not call it with gradients that are not finite: the others would wait for this peer in vain
            result = optimizer.step(*args, **kwargs)
        return result

    def pass_over(self, optimizer: Any) -> None:
        """Let an optimizer of the swarm end an epoch that is over, after a batch that has given no gradient."""
        optimizer.step(batch_size=0)


def scaler_for(scaler: torch.amp.GradScaler, reuse_grad_buffers: bool) -> torch.amp.GradScaler:
    """The scaler that hivemind needs in place of a given one, with its scale and settings.

    Gradients that are accumulated in place stay scaled until the swarm's step: that takes hivemind's scaler.
    Otherwise they are unscaled with each batch, as torch's does it.

    :param scaler: Lightning's, or the user's own
    :param reuse_grad_buffers: whether gradients are accumulated in the model's own buffers
    """
    return _as(GradScaler if reuse_grad_buffers else GradScalerOfBatches, scaler)


def scaler_of_one_peer(scaler: torch.amp.GradScaler) -> torch.amp.GradScaler:
    """A scaler for steps that one peer makes by itself, with the scale and settings of a given one."""
    return _as(torch.amp.GradScaler, scaler)


def _as(wanted: type[torch.amp.GradScaler], scaler: torch.amp.GradScaler) -> torch.amp.GradScaler:
    if type(scaler) is wanted:
        return scaler
    return wanted(
        device=scaler._device,
        init_scale=scaler.get_scale(),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
        enabled=scaler.is_enabled(),
    )
