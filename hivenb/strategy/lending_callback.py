"""Callbacks have the module between two batches, and in a validation: the first of them says so, before the others."""

from __future__ import annotations

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
