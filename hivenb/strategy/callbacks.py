"""The first callback of a Trainer: it says when the others have the module, and ends what goes on without data."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.utilities import _is_max_limit_reached

from hivenb.engine.optimizer.optimizer import Optimizer
from hivenb.strategy.trains import Trains


class FirstCallback(Callback):
    """Releases the module to the other callbacks, and ends training after a pass through the data without a batch.

    Other callbacks, and hooks of the module, may put other weights into the module between two batches and in a
    validation, as Lightning's ``WeightAveraging`` does; the strategy takes it back before each batch.

    Data that can be gone through only once, such as a generator, gives no batch in its second pass, nor in any further
    one. Lightning would go on with empty passes, for ever where no ``max_epochs`` is set.

    :param training: in which it is the first callback
    """

    # Lightning enters a context of its profiler for each hook that can be called, also for one that does nothing: these
    # are those of each batch
    on_train_batch_start: Any = None
    on_before_zero_grad: Any = None
    on_before_backward: Any = None
    on_after_backward: Any = None
    on_before_optimizer_step: Any = None
    on_validation_batch_start: Any = None
    on_validation_batch_end: Any = None

    def __init__(self, training: Trains):
        self._training = training
        #: whether training has ended since its data gave no batch any more
        self.data_is_exhausted = False

    @classmethod
    def among(cls, callbacks: list[Callback], training: Trains) -> FirstCallback:
        """A new one before all other callbacks of a Trainer, in place of that of the ``fit`` before."""
        made = cls(training)
        callbacks[:] = [made, *(callback for callback in callbacks if not isinstance(callback, cls))]
        return made

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (optimizer := self._training.optimizer) is not None:
            optimizer.release_module()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if (optimizer := self._living_optimizer()) is not None:
            with torch.inference_mode(False), torch.no_grad():
                optimizer.catch_up()  # before training there is Lightning's check
                optimizer.finish_delayed_updates()  # a checkpoint then holds the parameters that its score is of
                optimizer.release_module(keep=True)
        else:
            self._finish_without_averager()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if (optimizer := self._living_optimizer()) is not None:
            if _is_last_pass(trainer):  # what is saved of it is the trained model
                optimizer.finish_delayed_updates()
            optimizer.release_module(keep=True)
        elif _is_last_pass(trainer):
            self._finish_without_averager()
        passed = trainer.fit_loop.epoch_loop.batch_progress
        if passed.current.ready or trainer.should_stop:
            return
        data = trainer.train_dataloader
        again = f"pass {trainer.current_epoch + 1} through it" if passed.total.ready else "the first pass through it"
        self._training.notify(
            "the training data gave no batch any more",
            f"the training data ({type(data).__name__}) gave no batch in {again}, so training ends here. What can be "
            "gone through only once, such as a generator, lasts for one pass: give a DataLoader, or an object whose "
            "__iter__ begins anew",
        )
        self.data_is_exhausted = trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if (optimizer := self._living_optimizer()) is not None:
            optimizer.share_state(False)
            optimizer.finish_delayed_updates()  # else that would come over what callbacks leave in the model
            optimizer.release_module()
        else:
            self._finish_without_averager()

    def _finish_without_averager(self) -> None:
        """Let nobody see a model that is ahead of its optimizer, where what averages with others has ended."""
        optimizer = self._training.optimizer
        if optimizer is not None and optimizer.is_to_be_finished:
            with torch.inference_mode(False), torch.no_grad():
                optimizer.finish_delayed_updates()

    def _living_optimizer(self) -> Optimizer | None:
        optimizer = self._training.optimizer
        return optimizer if optimizer is not None and optimizer.is_alive() else None


def _is_last_pass(trainer: Any) -> bool:
    """Whether training ends after the pass through the data that has just ended, as far as is known by now."""
    # not Lightning's own ``done``, which says so on the page each time that it is asked
    loop = trainer.fit_loop
    return bool(
        trainer.should_stop
        or _is_max_limit_reached(loop.epoch_loop.global_step, loop.max_steps)
        or _is_max_limit_reached(loop.epoch_progress.current.processed, loop.max_epochs)
    )
