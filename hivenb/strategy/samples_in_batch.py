"""How many samples a batch holds, and how many have come since the last step."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities.data import _extract_batch_size as sizes_in
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn


class SampleCount:
    """Samples of the batches of one peer."""

    def __init__(self) -> None:
        #: of the present batch
        self.in_batch = 0
        self._of_first_batch = 0
        self._has_warned = False
        #: of the batches since the last step, without those that give no gradient
        self.since_step = 0

    def add(self, batch: Any, batch_size: int | None) -> None:
        """Count a batch.

        :param batch_size: of all batches; ``None`` to look at this one
        :raises MisconfigurationException: if its size cannot be told
        """
        self.in_batch = batch_size or count_samples(batch)
        self.since_step += self.in_batch
        if batch_size is None and not self._has_warned:
            self._warn_if_ambiguous(batch)

    def _warn_if_ambiguous(self, batch: Any) -> None:
        other = next((size for size in sizes_in(batch) if size not in (None, self.in_batch)), None)
        if other is None:
            return
        self._has_warned = True
        rank_zero_warn(
            f"A batch of type {type(batch).__name__} is taken for {self.in_batch} samples: its first tensor has so "
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
