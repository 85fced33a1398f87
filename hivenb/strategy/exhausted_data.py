"""Training data that can be gone through once only, such as a generator: noticed when there is no batch any more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.callbacks import Callback


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
