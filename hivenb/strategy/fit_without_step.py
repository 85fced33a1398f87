"""A training that ends before the swarm has made one step: said, since nothing else shows it."""

from __future__ import annotations

from hivenb.engine.optimizer.optimizer import Optimizer
from hivenb.options.options import Options
from hivenb.strategy.trains import Trains


class FirstEpoch:
    """The swarm epoch in which the first batch of a ``fit`` was computed: it is to be over at the end.

    :param training: that is looked at
    """

    def __init__(self, training: Trains):
        self._training = training
        self._number: int | None = None

    def begin(self) -> None:
        """Training begins."""
        self._number = None

    def see_batch(self) -> None:
        """A batch is about to be computed."""
        if self._number is None and (optimizer := self._training.optimizer) is not None:
            self._number = optimizer.local_epoch

    def end(self, *, data_is_exhausted: bool) -> None:
        """Training has ended: say so if the swarm has made no step.

        :param data_is_exhausted: whether it has ended since its data gave no batch any more
        """
        training = self._training
        trainer, optimizer = training.lightning_module.trainer, training.optimizer
        in_a_pass = not (trainer.fit_loop.epoch_loop.batch_progress.is_last_batch or data_is_exhausted)
        was_broken_off = trainer.should_stop and in_a_pass  # by somebody who did not wait for a step
        if was_broken_off or trainer.fast_dev_run or training.options.auxiliary or optimizer is None:
            return
        if optimizer.local_epoch == self._number:
            training.notify("the swarm has made no step", no_step(optimizer, training.options))


def no_step(optimizer: Optimizer, options: Options) -> str:
    """What has become of a training without a step of the swarm, and what to do, in words."""
    outcome = "nothing was averaged" if options.use_local_updates else "the model is what it was at its beginning"
    return (
        f"training has ended before the swarm has made a step, so {outcome}: this peer gave "
        f"{optimizer.local_progress.samples_accumulated} of target_batch_size={options.target_batch_size} samples. "
        "Lower target_batch_size at all peers, train for more epochs (max_epochs), or let more peers join"
    )
