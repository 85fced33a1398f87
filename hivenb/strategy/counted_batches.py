"""What a batch counts for in the swarm: its samples are told to the optimizer, and its gradient weighed by them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities.data import _extract_batch_size as sizes_in
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from hivenb.engine.network.dht import require_invited
from hivenb.engine.optimizer.optimizer import Optimizer
from hivenb.options.options import Options

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
        sizes = [count_samples(part) for part in parts]
        self.in_batch = batch_size or sum(sizes)
        self.since_step += self.in_batch
        if not self._has_warned:
            for part, size in zip(parts, sizes, strict=True):
                self._warn_if_ambiguous(part, size)

    def _warn_if_ambiguous(self, batch: Any, counted: int) -> None:
        other = next((size for size in sizes_in(batch) if size not in (None, counted)), None)
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
    try:
        return next(size for size in sizes_in(batch) if size is not None)
    except (StopIteration, RecursionError) as e:
        raise MisconfigurationException(
            f"cannot tell the number of samples in a batch of type {type(batch).__name__}; give it as "
            "HivemindStrategy(batch_size=...)"
        ) from e


# -- counted batches -------------------------------------------------------------------------------------------------


#: Seconds between two looks of an auxiliary peer, in place of each of its batches, whether there is a round to help in.
HELPING_INTERVAL = 0.1


class CountsBatches:
    """Mixin to put *before* all others of a strategy: what it does with a batch, from its data to the step."""

    options: Options
    dht: Any
    lightning_module: Any
    precision_plugin: Any
    recover: Callable[..., bool]
    recovering: Callable[..., Any]
    return_if_due: Callable[[], None]
    outlasting_ruin: Callable[[Callable[..., Any]], Callable[..., Any]]
    _optimizer: Optimizer | None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._samples = SampleCount()

    def on_train_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called in the training loop before anything happens for that batch; counts its samples.

        :raises NotInvitedError: if the invite to the swarm has expired, or this peer was shown the door
        """
        require_invited(self.dht)
        self.recover()
        self.return_if_due()
        if not self.options.auxiliary:
            self._samples.add(batch, self.options.batch_size, self.lightning_module.trainer.train_dataloader)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's training step; an auxiliary peer, which only helps the others to average, makes none."""
        if self.options.auxiliary:
            return None
        output = super().training_step(*args, **kwargs)  # type: ignore[misc]
        if output is None and self.lightning_module.automatic_optimization:
            self._samples.leave_out()  # Lightning computes no gradient then
        return output

    def pre_backward(self, closure_loss: Any) -> None:
        """Called before gradients are computed; where they are summed in the model, weighs a batch."""
        super().pre_backward(closure_loss)  # type: ignore[misc]
        if not self.options.reuse_grad_buffers or self._optimizer is None or not closure_loss.requires_grad:
            return
        averager, trainer = self._optimizer.grad_averager, self.lightning_module.trainer
        averager.keep_gradients()
        # Lightning divides the loss by the number of batches of a step
        averager.samples_of_weight_one = self._samples.of_first_batch * trainer.accumulate_grad_batches
        weight = self._samples.in_batch / self._samples.of_first_batch
        if weight != 1:
            closure_loss.register_hook(lambda gradient: gradient * weight)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        if self.options.auxiliary:
            closure()  # Lightning wants it called; it computes nothing
            time.sleep(HELPING_INTERVAL)
            return self.recovering(optimizer.step)
        # as the method of the base class, which takes no model of pytorch_lightning
        stepping: Any = model or self.lightning_module
        step, samples = self.outlasting_ruin(self._step), self._samples.since_step
        try:
            return self.recovering(step, optimizer, model=stepping, closure=closure, batch_size=samples, **kwargs)
        finally:
            self._samples.begin_anew()

    def _step(self, optimizer: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        scaler = getattr(self.precision_plugin, "scaler", None)
        # it is in the closure that a batch turns out to give no gradient
        optimizer.left_out.counted = lambda said: min(said, self._samples.since_step)
        if scaler is None:
            return self.precision_plugin.optimizer_step(optimizer, closure=closure, **kwargs)

        def computing() -> int | None:
            closure()
            return self._samples.since_step or None  # without a result, Lightning hands nothing to the scaler

        output = self.precision_plugin.optimizer_step(optimizer, closure=computing, **kwargs)
        if self.lightning_module.automatic_optimization and not self._samples.since_step:
            scaler.pass_over(optimizer)
        return output
