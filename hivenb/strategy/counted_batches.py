"""What a batch counts for in the swarm: its samples are told to the optimizer, and its gradient weighed by them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hivenb.engine.dht.dht import require_invited
from hivenb.engine.optimizer.optimizer import Optimizer
from hivenb.options.options import Options
from hivenb.strategy.samples_in_batch import SampleCount

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
