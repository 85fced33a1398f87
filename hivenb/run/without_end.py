"""A Trainer that has the person's ``max_steps`` and ``max_epochs``, for all who ask, and does not end by them."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop


class WithoutEnd(Callback):
    """Lets a Trainer train until it is told to stop, and count from nothing at each start.

    For a local peer: its run decides when it ends, and its schedules, which may be made of these numbers, are to be the
    run's.
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        trainer.fit_loop.__class__ = _FitLoopWithoutEnd
        trainer.fit_loop.epoch_loop.__class__ = _EpochLoopWithoutEnd


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
