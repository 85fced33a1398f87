"""What a batch counts for in the swarm: its samples are told to the optimizer, and its gradient weighed by them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from hivenb.engine.network.dht import require_invited
from hivenb.strategy.live_changes import Recovery
from hivenb.strategy.rollback import Rollback
from hivenb.strategy.trains import Trains

# -- samples in batch ------------------------------------------------------------------------------------------------
#
# How many samples a batch holds, and how many have come since the last step.


#: Tensors and other things in the first batch in which another number of samples is looked for.
MOST_LOOKED_AT = 10_000


class SampleCount:
    """Samples of the batches of one peer."""

    def __init__(self) -> None:
        #: of the present batch
        self.in_batch = 0
        self._of_first_batch = 0
        self._is_first = True
        self._has_gradient = False
        #: of the batches since the last step that have given a gradient
        self.since_step = 0

    def look_at(self, batch: Any, batch_size: int | None, loaders: Any = None) -> None:
        """Count the samples of a batch that comes next.

        :param batch_size: of all batches; ``None`` to look at this one
        :param loaders: that it comes from, as a Trainer has them: of several, all samples count
        :raises MisconfigurationException: if its size cannot be told
        """
        parts = [] if batch_size else batches_in(batch, loaders) or [batch]
        self.in_batch, self._has_gradient = batch_size or sum(map(self._count, parts)), False
        self._is_first = False

    def _count(self, batch: Any) -> int:
        sizes = sizes_in(batch)
        counted = _first_of(sizes, batch)
        if self._is_first:
            _warn_if_ambiguous(batch, counted, sizes)
        return counted

    def note_gradient(self) -> None:
        """The present batch gives a gradient, or another one."""
        if not self._has_gradient:
            self._has_gradient = True
            self.since_step += self.in_batch

    @property
    def at_most(self) -> int:
        """How many samples the next step can have, with those of the present batch."""
        return self.since_step + self.in_batch

    def counted(self, said: int) -> int:
        """How many count of those that a step has at most: in its closure a batch gives a gradient, or none."""
        return min(said, self.since_step)

    def begin_anew(self) -> None:
        """There is no gradient any more: a step was made with what there was, or it was taken away."""
        self.since_step, self._has_gradient = 0, False

    @property
    def of_first_batch(self) -> int:
        """Samples of the batch at which this was first looked at: each other one is weighed against it. At least 1."""
        self._of_first_batch = self._of_first_batch or self.in_batch
        return self._of_first_batch or 1


def _warn_if_ambiguous(batch: Any, counted: int, further: Iterator[int | None]) -> None:
    other = next((size for size in islice(further, MOST_LOOKED_AT) if size not in (None, counted)), None)
    if other is None:
        return
    rank_zero_warn(
        f"A batch of type {type(batch).__name__} is taken for {counted} samples: its first tensor has so "
        f"many, and another one in it has {other}. If that is wrong, this peer counts for too little or "
        "too much: give it as HivemindStrategy(batch_size=...), or Options(batch_size=...)"
    )


def batches_in(batch: Any, loaders: Any) -> list[Any]:
    """The batches of several loaders that a CombinedLoader has put into one, but for those of loaders that are through.

    :param loaders: in the collections in which the Trainer has them
    :returns: the whole batch, if that is not how it looks, as after a hook of the person's
    """
    if type(batch) is type(loaders) and isinstance(loaders, dict) and batch.keys() == loaders.keys():
        return [part for name, one in loaders.items() for part in batches_in(batch[name], one)]
    if type(batch) is type(loaders) and isinstance(loaders, (list, tuple)) and len(batch) == len(loaders):
        return [part for own, one in zip(batch, loaders, strict=True) for part in batches_in(own, one)]
    return [] if batch is None else [batch]


def count_samples(batch: Any) -> int:
    """Samples in a batch of whatever type, as Lightning finds them: those of the first tensor.

    :raises MisconfigurationException: if it cannot be told; the message says what to do
    """
    # not by extract_batch_size, which says of some batches to give their size to self.log: without effect here
    return _first_of(sizes_in(batch), batch)


def sizes_in(part: Any) -> Iterator[int | None]:
    """Samples of each tensor in a batch, in the order in which Lightning finds them; ``None`` for what has none."""
    if isinstance(part, torch.Tensor):
        yield part.size(0) if part.ndim else 1
    elif isinstance(part, np.ndarray) and part.dtype != object:
        yield None  # as one; each of its numbers would take a microsecond
    elif isinstance(part, Iterable) and not isinstance(part, (str, bytes, bytearray, memoryview)):
        for one in part.values() if isinstance(part, Mapping) else part:
            yield from sizes_in(one)
    elif dataclasses.is_dataclass(part) and not isinstance(part, type):
        for field in dataclasses.fields(part):
            yield from sizes_in(getattr(part, field.name))
    else:
        yield None


def _first_of(sizes: Iterator[int | None], batch: Any) -> int:
    try:
        return next(size for size in sizes if size is not None)
    except (StopIteration, RecursionError) as e:
        raise MisconfigurationException(
            f"cannot tell the number of samples in a batch of type {type(batch).__name__}; give it as "
            "HivemindStrategy(batch_size=...)"
        ) from e


# -- counted batches -------------------------------------------------------------------------------------------------


#: Seconds between two looks of an auxiliary peer, in place of each of its batches, whether there is a round to help in.
HELPING_INTERVAL = 0.1


class CountedBatches:
    """What a strategy does with a batch, from its data to the step.

    :param training: that computes it
    :param recovery: of its averagers
    :param rollback: to its last good state
    """

    def __init__(self, training: Trains, recovery: Recovery, rollback: Rollback):
        self._training, self._recovery, self._rollback = training, recovery, rollback
        self._samples = SampleCount()

    def begin_anew(self) -> None:
        """The gradients of earlier batches are gone."""
        self._samples.begin_anew()

    @property
    def samples_in_batch(self) -> int:
        """Of the present batch; 0 for an auxiliary peer, which computes none."""
        return 0 if self._training.options.auxiliary else self._samples.in_batch

    def begin(self, batch: Any) -> None:
        """Be ready for a batch, before anything happens for it, and count its samples.

        :raises NotInvitedError: if the invite to the swarm has expired, or this peer was banned
        """
        training = self._training
        require_invited(training.dht)
        self._recovery.recover()
        self._rollback.return_if_due()
        options = training.options
        if not options.auxiliary:
            loaders = None if options.batch_size else training.lightning_module.trainer.train_dataloader
            self._samples.look_at(batch, options.batch_size, loaders)

    def training_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The module's training step; an auxiliary peer, which only helps the others to average, makes none.

        :param step: Lightning's
        """
        if self._training.options.auxiliary:
            module = self._training.lightning_module
            if not module.automatic_optimization:
                module.optimizers().step()  # which the module's own step would call; it comes to optimizer_step below
            return None
        output = step(*args, **kwargs)
        self._rollback.see_loss(output)
        return output

    def before_backward(self, closure_loss: Any) -> None:
        """Count a batch, as it gives a gradient; and weigh it, where gradients of several batches are summed."""
        training = self._training
        if not closure_loss.requires_grad:
            return
        self._samples.note_gradient()
        if training.options.reuse_grad_buffers:
            if (optimizer := training.optimizer) is None:
                return
            averager, trainer = optimizer.grad_averager, training.lightning_module.trainer
            averager.keep_gradients()
            # Lightning divides the loss by the number of batches of a step
            averager.sum_in_units_of(self._samples.of_first_batch * trainer.accumulate_grad_batches)
        elif not self._sums_for_a_step:
            return
        weight = self._samples.in_batch / self._samples.of_first_batch
        if weight != 1:
            closure_loss.register_hook(lambda gradient: gradient * weight)

    @property
    def _sums_for_a_step(self) -> bool:
        """Whether Lightning sums gradients of several batches up for a step, which the optimizer takes for a mean."""
        module = self._training.lightning_module
        is_summed = module.automatic_optimization and module.trainer.accumulate_grad_batches > 1
        return bool(is_summed and not self._training.options.reuse_grad_buffers)

    def _to_mean(self, optimizer: Any) -> None:
        """Let the sum of the weighed gradients of a step be their mean over its samples.

        They are as many as Lightning has divided by, unless the pass has ended or begun within the step, a batch has
        given none, or batches are unequal.
        """
        if not (samples := self._samples.since_step) or not self._sums_for_a_step:
            return
        every = self._training.lightning_module.trainer.accumulate_grad_batches
        factor = every * self._samples.of_first_batch / samples
        if factor != 1:
            parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
            if gradients := [one.grad for one in parameters if one.grad is not None]:  # a hook may have taken them away
                torch._foreach_mul_(gradients, factor)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Make a step of the swarm's optimizer, with the batches since the last one.

        :param optimizer: the swarm's
        :param closure: computes the batch
        :param model: the module, if it is another one than the strategy's
        """
        recovery, samples = self._recovery, self._samples
        if self._training.options.auxiliary:
            closure()  # Lightning wants it called; it computes nothing
            time.sleep(HELPING_INTERVAL)
            return recovery.recovering(optimizer.step)
        if not self._training.lightning_module.automatic_optimization and not samples.since_step:
            samples.note_gradient()  # by loss.backward(), which tells nobody
        # as the method of the base class, which takes no model of pytorch_lightning
        kwargs |= {"model": model or self._training.lightning_module, "batch_size": samples.at_most}
        try:
            return recovery.recovering(self._rollback.tolerating_divergence, self._step, optimizer, closure, **kwargs)
        finally:
            samples.begin_anew()

    def _step(self, optimizer: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        plugin, samples = self._training.precision_plugin, self._samples
        scaler = getattr(plugin, "scaler", None)
        optimizer.skipped_batches.counted = samples.counted

        def computing() -> Any:
            output = closure()
            self._to_mean(optimizer)  # before the gradients are clipped
            # without a result, Lightning hands nothing to a scaler
            return output if scaler is None else samples.since_step or None

        output = plugin.optimizer_step(optimizer, closure=computing, **kwargs)
        if scaler is None:
            return output
        if self._training.lightning_module.automatic_optimization and not samples.since_step:
            scaler.pass_over(optimizer)
        return output
