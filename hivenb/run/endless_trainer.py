"""A Trainer that has the person's ``max_steps`` and ``max_epochs``, for all who ask, and does not end by them."""

from __future__ import annotations

from typing import Any

from lightning import Trainer
from lightning.pytorch.loops import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop


def trainer_without_end(**kwargs: Any) -> Trainer:
    """A Trainer that trains until it is told to stop, and counts from nothing at each start.

    For a local peer: its run decides when it ends, and its schedules, which may be made of these numbers, are to be the
    run's.

    :param kwargs: of ``lightning.Trainer``
    """
    trainer = Trainer(**kwargs)
    ending = trainer.fit_loop
    # as a Trainer makes its own
    trainer.fit_loop = _FitLoopWithoutEnd(trainer, ending.min_epochs, ending.max_epochs)
    trainer.fit_loop.epoch_loop = _EpochLoopWithoutEnd(trainer, ending.min_steps, ending.max_steps)
    return trainer


class _FitLoopWithoutEnd(_FitLoop):
    @property
    def done(self) -> bool:
        return self.max_batches == 0 or bool(self.trainer.should_stop)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: Lightning refuses to go on after more passes than ``max_epochs``."""


class _EpochLoopWithoutEnd(_TrainingEpochLoop):
    @property
    def _is_training_done(self) -> bool:
        return self._num_ready_batches_reached()
