"""Whether training has diverged: a loss that is not finite, or far above what it was, for several batches in a row."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from itertools import islice
from statistics import median

#: Batches in a row whose losses have to be strange: one or two are what noise, or a bad batch, looks like.
IN_A_ROW = 8

#: Latest losses that were not strange, by which the next one is judged.
RECENT = 128

#: First losses, which tell how large the loss of a model is that knows nothing.
FIRST = 16

#: How often the width of the recent losses a strange one is above their median.
WIDTHS = 10.0

#: How often as large as the first ones a strange one is at least, where it is that far above the recent ones as well:
#: a schedule that starts anew costs all that was learned at worst.
ABOVE_FIRST = 2.0

#: How often as large as the first ones a loss is strange, however slowly it came there.
FAR_ABOVE_FIRST = 10.0

#: Strange losses that are finite, in a row, after which they are taken for what is usual by now.
USUAL_AFTER = 1024


class LossWatch:
    """Judges the losses of one peer, batch by batch.

    The numbers above are such that nothing that was measured gave a false alarm: small tasks with batches of 2 to 64,
    several optimizers and rates, and schedules that start anew (``tests/strategy/test_divergence.py``).
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._first: list[float] = []
        #: losses up to which nothing is strange, and beyond which everything is; as soon as the first ones are known
        self._bounds: tuple[float, float] | None = None
        self._strange = 0

    @property
    def is_calm(self) -> bool:
        """Whether the latest loss is as usual."""
        return self._strange == 0

    @property
    def has_exploded(self) -> bool:
        """Whether the latest losses are all strange."""
        return self._strange >= IN_A_ROW

    def note(self, losses: Iterable[float]) -> None:
        """Go on with the losses of further batches.

        :param losses: oldest first
        """
        for loss in losses:
            if self._is_strange(loss):
                self._strange += 1
                if math.isfinite(loss) and self._strange >= USUAL_AFTER:
                    self.begin_anew()
                continue
            self._strange = 0
            self._recent.append(loss)
            if len(self._first) < FIRST:
                self._first.append(loss)
                self._bounds = _bounds(self._first) if len(self._first) == FIRST else None

    def forget_explosion(self) -> None:
        """Judge what comes next as if nothing had happened: training has returned to where it was."""
        self._strange = 0

    def begin_anew(self) -> None:
        """Know of no losses: what comes next is of another training, or a loss that was strange is usual by now."""
        self._recent.clear()
        self._first.clear()
        self._bounds, self._strange = None, 0

    def _is_strange(self, loss: float) -> bool:
        if not math.isfinite(loss):
            return True
        if self._bounds is None or loss <= self._bounds[0]:
            return False
        return loss > self._bounds[1] or loss > median(self._recent) + WIDTHS * _width(self._recent)


def _bounds(first: list[float]) -> tuple[float, float]:
    usual = median(first)
    size = max(abs(usual), _width(first))
    return usual + (ABOVE_FIRST - 1) * size, usual + (FAR_ABOVE_FIRST - 1) * size


def _width(losses: Iterable[float]) -> float:
    """Between the lowest and the highest tenth."""
    ordered = sorted(losses)
    tenth = len(ordered) // 10
    inner = list(islice(ordered, tenth, len(ordered) - tenth))
    return inner[-1] - inner[0]
