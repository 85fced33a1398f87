"""What a batch counts for in the swarm: its samples are told to the optimizer, and its gradient weighed by them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch.utilities.data import _extract_batch_size as sizes_in
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from hivenb.engine.network.dht import require_invited
from hivenb.strategy.live_changes import Recovery
from hivenb.strategy.rollback import Rollback
from hivenb.strategy.trains import Trains

# -- samples in batch ------------------------------------------------------------------------------------------------
#
# How many samples a batch holds, and how many have come since the last step.


class SampleCount:
    """Samples of the batches of one peer."""

    def __init__(self) -> None:
        #: of the present batch
        self.in_batch = 0
        self._of_first_batch = 0
        self._has_warned = False
        #: of the batches since the last step, without those that give no gradient
        self.since_step = 0

    def add(self, batch: Any, batch_size: int | None, loaders: Any = None) -> None:
        """Count a batch.

        :param batch_size: of all batches; ``None`` to look at this one
        :param loaders: that it comes from, as a Trainer has them: of several, all samples count
        :raises MisconfigurationException: if its size cannot be told
        """
        parts = [] if batch_size else batches_in(batch, loaders) or [batch]
        self.in_batch = batch_size or sum(map(self._count, parts))
        self.since_step += self.in_batch

    def _count(self, batch: Any) -> int:
        sizes = sizes_in(batch)
        counted = _first_of(sizes, batch)
        if not self._has_warned:
            self._warn_if_ambiguous(batch, counted, sizes)
        return counted

    def _warn_if_ambiguous(self, batch: Any, counted: int, further: Iterator[int | None]) -> None:
        other = next((size for size in further if size not in (None, counted)), None)
        if other is None:
            return
        self._has_warned = True
        rank_zero_warn(
            f"A batch of type {type(batch).__name__} is taken for {counted} samples: its first tensor has so "
            f"many, and another one in it has {other}. If that is wrong, this peer counts for too little or "
            "too much: give it as HivemindStrategy(batch_size=...), or Options(batch_size=...)"
        )

    def leave_out(self) -> None:
        """Let the present batch count no more: it gives no gradient."""
        self.since_step -= self.in_batch

    def counted(self, said: int) -> int:
        """How many count of the samples that a step is said to have: it is in its closure that a batch gives none."""
        return min(said, self.since_step)

    def begin_anew(self) -> None:
        """A step was made with what there is."""
        self.since_step = 0

    @property
    def of_first_batch(self) -> int:
        """Samples of the batch at which this was first looked at: each other one is weighed against it."""
        self._of_first_batch = self._of_first_batch or self.in_batch
        return self._of_first_batch


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

    @property
    def samples_in_batch(self) -> int:
        """Of the present batch."""
        return self._samples.in_batch

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
            self._samples.add(batch, options.batch_size, loaders)

    def training_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The module's training step; an auxiliary peer, which only helps the others to average, makes none.

        :param step: Lightning's
        """
        if self._training.options.auxiliary:
            return None
        output = step(*args, **kwargs)
        self._rollback.see_loss(output)
        if output is None and self._training.lightning_module.automatic_optimization:
            self._samples.leave_out()  # Lightning computes no gradient then
        return output

    def weigh(self, closure_loss: Any) -> None:
        """Weigh a batch before its gradients are computed, where they are summed in the model."""
        training = self._training
        if not training.options.reuse_grad_buffers or not closure_loss.requires_grad:
            return
        if (optimizer := training.optimizer) is None:
            return
        averager, trainer = optimizer.grad_averager, training.lightning_module.trainer
        averager.keep_gradients()
        # Lightning divides the loss by the number of batches of a step
        averager.samples_of_weight_one = self._samples.of_first_batch * trainer.accumulate_grad_batches
        weight = self._samples.in_batch / self._samples.of_first_batch
        if weight != 1:
            closure_loss.register_hook(lambda gradient: gradient * weight)

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
        # as the method of the base class, which takes no model of pytorch_lightning
        kwargs |= {"model": model or self._training.lightning_module, "batch_size": samples.since_step}
        try:
            return recovery.recovering(self._rollback.tolerating_divergence, self._step, optimizer, closure, **kwargs)
        finally:
            samples.begin_anew()

    def _step(self, optimizer: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        plugin, samples = self._training.precision_plugin, self._samples
        scaler = getattr(plugin, "scaler", None)
        optimizer.skipped_batches.counted = samples.counted
        if scaler is None:
            return plugin.optimizer_step(optimizer, closure=closure, **kwargs)

        def computing() -> int | None:
            closure()
            return samples.since_step or None  # without a result, Lightning hands nothing to the scaler

        output = plugin.optimizer_step(optimizer, closure=computing, **kwargs)
        if self._training.lightning_module.automatic_optimization and not samples.since_step:
            scaler.pass_over(optimizer)
        return output
