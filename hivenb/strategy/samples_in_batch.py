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

    def add(self, batch: Any, batch_size: int | None, loaders: Any = None) -> None:
        """Count a batch.

        :param batch_size: of all batches; ``None`` to look at this one
        :param loaders: that it comes from, as a Trainer has them: of several, all samples count
        :raises MisconfigurationException: if its size cannot be told
        """
        parts = [] if batch_size else batches_in(batch, loaders) or [batch]
        sizes = [count_samples(part) for part in parts]
        self.in_batch = batch_size or sum(sizes)
        self.since_step += self.in_batch
        if not self._has_warned:
            for part, size in zip(parts, sizes, strict=True):
                self._warn_if_ambiguous(part, size)

    def _warn_if_ambiguous(self, batch: Any, counted: int) -> None:
        other = next((size for size in sizes_in(batch) if size not in (None, counted)), None)
        if other is None:
            return
        self._has_warned = True
        rank_zero_warn(
            f"A batch of type {type(batch).__name__} is taken for {counted} samples: its first tensor has so "
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


def batches_in(batch: Any, loaders: Any) -> list[Any]:
    """The batches of several loaders that a CombinedLoader has put into one, but for those of loaders that are through.

    :param loaders: in the collections in which the Trainer has them
    :returns: the whole batch, if that is not how it looks, as after a hook of the person's
    """
    if type(batch) is type(loaders) and isinstance(loaders, dict) and batch.keys() == loaders.keys():
        return [part for name, one in loaders.items() for part in batches_in(batch[name], one)]
    if type(batch) is type(loaders) and isinstance(loaders, (list, tuple)) and len(batch) == len(loaders):
        return [part for own, one in zip(batch, loaders, strict=True) for part in batches_in(own, one)]
    return [] if batch is None else [batch]


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
