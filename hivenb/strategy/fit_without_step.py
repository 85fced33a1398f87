"""A training that ends before the swarm has made one step: said, since nothing else shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hivenb.engine.optimizer.optimizer import Optimizer
from hivenb.options.options import Options


class SaysIfNoStep:
    """Mixin to put *before* Lightning's strategy."""

    options: Options
    notify: Callable[[str, str], None]
    lightning_module: Any
    data_is_exhausted: bool
    _optimizer: Optimizer | None

    #: of the swarm, in which the first batch of the present or last ``fit`` was computed; ``None`` without one
    _first_epoch: int | None = None

    def on_train_start(self) -> None:
        self._first_epoch = None
        super().on_train_start()  # type: ignore[misc]

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_start(*args, **kwargs)  # type: ignore[misc]
        if self._first_epoch is None and self._optimizer is not None:
            self._first_epoch = self._optimizer.local_epoch

    def on_train_end(self) -> None:
        super().on_train_end()  # type: ignore[misc]
        trainer, optimizer = self.lightning_module.trainer, self._optimizer
        in_a_pass = not (trainer.fit_loop.epoch_loop.batch_progress.is_last_batch or self.data_is_exhausted)
        was_broken_off = trainer.should_stop and in_a_pass  # by somebody who did not wait for a step
        if was_broken_off or trainer.fast_dev_run or self.options.auxiliary or optimizer is None:
            return
        if optimizer.local_epoch == self._first_epoch:
            self.notify("the swarm has made no step", no_step(optimizer, self.options))


def no_step(optimizer: Optimizer, options: Options) -> str:
    """What has become of a training without a step of the swarm, and what to do, in words."""
    outcome = "nothing was averaged" if options.use_local_updates else "the model is what it was at its beginning"
    return (
        f"training has ended before the swarm has made a step, so {outcome}: this peer gave "
        f"{optimizer.local_progress.samples_accumulated} of target_batch_size={options.target_batch_size} samples. "
        "Lower target_batch_size at all peers, train for more epochs (max_epochs), or let more peers join"
    )
