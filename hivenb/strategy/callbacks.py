"""Callbacks have the module between two batches, and in a validation: the first of them says so, before the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from hivenb.engine.optimizer.optimizer import Optimizer


class LendsModule(Callback):
    """Lets the swarm's optimizer know when other callbacks, and hooks of the module, may put other weights into it.

    Lightning's ``WeightAveraging`` does so while it validates and when training has ended, others when they like. It is
    the first callback of its Trainer; the strategy takes the module back before each batch.
    """

    @classmethod
    def among(cls, callbacks: list[Callback]) -> None:
        """Be there once, before all other callbacks of a Trainer."""
        callbacks[:] = [cls(), *(callback for callback in callbacks if not isinstance(callback, cls))]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (optimizer := _optimizer_of(trainer)) is not None:
            optimizer.lend_module()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if (optimizer := _optimizer_of(trainer)) is not None:
            with torch.inference_mode(False), torch.no_grad():
                optimizer.catch_up()  # before training there is Lightning's check
                optimizer.finish_delayed_updates()  # a checkpoint then holds the parameters that its score is of
                optimizer.lend_module(keep=True)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if (optimizer := _optimizer_of(trainer)) is not None:
            optimizer.lend_module(keep=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if (optimizer := _optimizer_of(trainer)) is not None:
            optimizer.share_state(False)
            optimizer.finish_delayed_updates()  # else that would come over what callbacks leave in the model
            optimizer.lend_module()


def _optimizer_of(trainer: Any) -> Optimizer | None:
    optimizer = trainer.strategy.optimizer
    return optimizer if optimizer is not None and optimizer.is_alive() else None


# -- exhausted data --------------------------------------------------------------------------------------------------
#
# Training data that can be gone through once only, such as a generator: noticed when there is no batch any more.


class EndsWithItsData:
    """Mixin for a strategy that has :class:`ExhaustedData` among the callbacks of its Trainer."""

    _exhausted: ExhaustedData | None = None

    @property
    def data_is_exhausted(self) -> bool:
        """Whether the present or last ``fit`` has ended since its data gave no batch any more."""
        return self._exhausted is not None and self._exhausted.was_found


class ExhaustedData(Callback):
    """Ends training after a pass through the data in which there was no batch; each further one would be the same.

    Lightning would go on with empty passes, for ever where no ``max_epochs`` is set.

    :param notify: told in a few words what has happened; and at length, with what to do
    """

    def __init__(self, notify: Callable[[str, str], None]):
        self._notify = notify
        #: whether training has ended so
        self.was_found = False

    @classmethod
    def among(cls, callbacks: list[Callback], notify: Callable[[str, str], None]) -> ExhaustedData:
        """A new one among the callbacks of a Trainer, in place of that of the ``fit`` before."""
        callbacks[:] = [callback for callback in callbacks if not isinstance(callback, cls)]
        callbacks.append(made := cls(notify))
        return made

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        passed = trainer.fit_loop.epoch_loop.batch_progress
        if passed.current.ready or trainer.should_stop:
            return
        data = trainer.train_dataloader
        again = f"pass {trainer.current_epoch + 1} through it" if passed.total.ready else "the first pass through it"
        self._notify(
            "the training data gave no batch any more",
            f"the training data ({type(data).__name__}) gave no batch in {again}, so training ends here. What can be "
            "gone through only once, such as a generator, lasts for one pass: give a DataLoader, or an object whose "
            "__iter__ begins anew",
        )
        self.was_found = trainer.should_stop = True
