"""How many samples a batch holds, and how many have come since the last step."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException


class SampleCount:
    """Samples of the batches of one peer."""

    def __init__(self) -> None:
        #: of the present batch
        self.in_batch = 0
        self._of_first_batch = 0
        #: of the batches since the last step, without those that give no gradient
        self.since_step = 0

    def add(self, batch: Any, batch_size: int | None) -> None:
        """Count a batch.

        :param batch_size: of all batches; ``None`` to look at this one
        :raises MisconfigurationException: if its size cannot be told
        """
        self.in_batch = batch_size or count_samples(batch)
        self.since_step += self.in_batch

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
    """Samples in a batch of whatever type, as Lightning finds them.

    :raises MisconfigurationException: if it cannot be told; the message says what to do
    """
    try:
        return extract_batch_size(batch)
    except (MisconfigurationException, RecursionError) as e:
        raise MisconfigurationException(
            f"cannot tell the number of samples in a batch of type {type(batch).__name__}; give it as "
            "HivemindStrategy(batch_size=...)"
        ) from e
