"""Sums of the gradients of an epoch's batches: weighed by samples, and written no more often than they have to be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from hivemind.optim.grad_averager import GradientAverager
from hivemind.utils import get_logger

from hivenb.engine.averagers.finite import LateVerdict, are_finite, where_not_finite
from hivenb.engine.averagers.staging import StagesBuffers
from hivenb.engine.rounds.round import NEXT_TO_NOTHING

logger = get_logger(__name__)


@dataclass(frozen=True)
class Unjudged:
    """A batch of which it is not known yet whether it counts.

    :param verdict: on whether its gradients are finite
    :param samples: in it
    """

    verdict: LateVerdict
    samples: int


class AccumulatesBySamples(StagesBuffers, GradientAverager):
    """Mixin to put *before* a gradient averager: batches count by their samples, and are summed in single precision."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], *args: Any, **kwargs: Any):
        # hivemind/optim/grad_averager.py takes the gradients' own type: sums of many batches in bfloat16 stop to grow,
        # and torch does not accept them as gradients of an offloaded copy in float32
        parameters = tuple(parameters)
        types = [torch.promote_types(parameter.dtype, torch.float32) for parameter in parameters]
        if not kwargs.get("averaged_grads"):
            kwargs["averaged_grads"] = tuple(
                torch.zeros(parameter.shape, dtype=dtype).share_memory_()
                for parameter, dtype in zip(parameters, types, strict=True)
            )
        self._is_loaded = False
        self._last: Unjudged | None = None
        super().__init__(parameters, *args, **kwargs)
        if self._local_accumulators is not None:
            self._local_accumulators = tuple(
                accumulator.to(dtype) for accumulator, dtype in zip(self._local_accumulators, types, strict=True)
            )

    #: Samples for which a gradient counts as one where they are summed in the model's own buffers, by whoever computes
    #: them: each was weighed by its samples over these. By default all batches are taken for equally large.
    samples_of_weight_one: float | None = None

    @torch.no_grad()
    def accumulate_grads_(self, batch_size: int) -> None:
        """Add the gradients of a batch to those of the epoch, unless they are summed in the model's own buffers.

        :param batch_size: samples in it
        """
        # Replaces the method of hivemind/optim/grad_averager.py, which sets the sums to zero first: with large models,
        # each pass through memory takes as long as the network does
        is_first = self.local_times_accumulated == 0
        self._is_loaded = False
        self._anchor_batch_size = self._anchor_batch_size or batch_size
        self.local_samples_accumulated += batch_size
        self.local_times_accumulated += 1
        if self.reuse_grad_buffers:
            return
        weight = batch_size / self._anchor_batch_size
        gradients, totals = list(self._grads_from_parameters()), list(self._grad_accumulators())
        if all(one.device == total.device and not one.is_sparse for one, total in zip(gradients, totals, strict=True)):
            # a GPU waits for one call instead of one for each parameter
            if is_first:
                torch._foreach_copy_(totals, gradients)
            else:
                torch._foreach_add_(totals, gradients, alpha=weight)
            return
        for gradient, total in zip(gradients, totals, strict=True):
            (total.zero_() if is_first else total).add_(gradient.to(total.device), alpha=1.0 if is_first else weight)

    def accumulate_if_finite_(self, batch_size: int) -> Unjudged:
        """Add the gradients of a batch, or zeros if they are not finite, which only the device knows at first.

        They count as finite ones until :meth:`take_back`. Not for those that are summed in the model's own buffers.

        :param batch_size: samples in it
        """
        gradients = list(self._grads_from_parameters())
        self._last = Unjudged(LateVerdict(gradients), batch_size)
        self._last.verdict.silence(gradients)
        self.accumulate_grads_(batch_size)
        return self._last

    def take_back(self, batch: Unjudged) -> None:
        """Let a batch, the last one, count no more: its gradients were not finite, and zeros were added instead."""
        if batch is not self._last:
            return  # it went with its epoch
        self.local_samples_accumulated -= batch.samples
        self.local_times_accumulated -= 1
        if not self.local_times_accumulated:
            self.reset_accumulated_grads_()

    def step(self, *args: Any, **kwargs: Any) -> Any:
        if not self.local_samples_accumulated and not args and kwargs.get("weight") is None:
            kwargs["weight"] = NEXT_TO_NOTHING  # all of its batches were left out
        sums = list(self._grad_accumulators()) if self.local_samples_accumulated else []
        if not are_finite(sums):
            # sums of what was finite; the others would refuse it, and leave this peer out
            logger.warning(f"The gradients of an epoch count for nothing: {where_not_finite(sums)}, as summed")
            kwargs.pop("weight", None)
            args = (NEXT_TO_NOTHING, *args[1:])  # hivemind's first argument
            torch._foreach_zero_(sums)
            self._is_loaded = False
        return super().step(*args, **kwargs)

    def reset_accumulated_grads_(self) -> None:
        """Begin anew. The next batch is written over what was summed up, unless that is in the model's own buffers."""
        self._last = None
        self._is_loaded = False
        if self.reuse_grad_buffers:
            super().reset_accumulated_grads_()
            return
        self._accumulators_used_in_step = False
        self.local_samples_accumulated = self.local_times_accumulated = 0
        self._anchor_batch_size = None

    @torch.no_grad()
    def load_accumulators_into_averager_(self) -> None:
        """Give the mean gradient to the averager, of zero if there were no samples; at once if it has it already."""
        # Replaces the method of hivemind/optim/grad_averager.py, which divides a sum in units of the first batch by the
        # number of batches: with a dataset's small last batch as the first one of an epoch, gradients are too large by
        # a factor of about 30. Where a peer is alone, it is called twice.
        if self._is_loaded:
            return
        factor = 1.0 / self._weight_of_all() if self.local_times_accumulated else 0.0
        with self.get_tensors() as averaged:
            totals = list(self._grad_accumulators())
            if not factor:
                torch._foreach_zero_(averaged)
            elif all(total.device == mean.device for total, mean in zip(totals, averaged, strict=True)):
                for total, mean in zip(totals, averaged, strict=True):
                    torch.mul(total, factor, out=mean)
            elif self.reuse_grad_buffers:
                self.copy_staged(totals, averaged)
                torch._foreach_mul_(averaged, factor)
            else:  # a GPU is the faster one at it; what it has from now on is the sum in units of all samples
                torch._foreach_mul_(totals, factor)
                self._anchor_batch_size = self.local_samples_accumulated
                self.copy_staged(totals, averaged)
        self._is_loaded = True

    def keep_gradients(self) -> None:
        """Have a gradient for each parameter before any is computed, where they are summed in the model's own buffers.

        Else autograd takes for one what is computed first; and that CUDA graphs write over with the next batch.
        """
        for _ in self._grads_from_parameters():
            pass

    def _weight_of_all(self) -> float:
        """By what the sum of the accumulated gradients is to be divided."""
        unit = self.samples_of_weight_one if self.reuse_grad_buffers else self._anchor_batch_size
        return self.local_samples_accumulated / unit if unit else self.local_times_accumulated

    @torch.no_grad()
    def mean_gradients(self) -> tuple[torch.Tensor, ...] | None:
        """The mean gradient over the samples of the present epoch, one tensor for each parameter; ``None`` if none."""
        if not self.local_samples_accumulated:
            return None
        divisor = self._weight_of_all()
        return tuple(accumulator.detach().clone().div_(divisor) for accumulator in self._grad_accumulators())

    @torch.no_grad()
    def set_mean_gradients(self, gradients: Iterable[torch.Tensor], samples: int) -> None:
        """Begin with what was accumulated before, as if it were one batch.

        :param gradients: the mean over those samples, one tensor for each parameter, of its shape
        :param samples: how many that were
        """
        self._is_loaded = False
        self.local_samples_accumulated, self.local_times_accumulated = samples, 1
        self._anchor_batch_size = samples
        for accumulator, gradient in zip(self._grad_accumulators(), gradients, strict=True):
            accumulator.copy_(gradient).mul_(self._weight_of_all())
