"""What a run's time went into."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hivenb.figures.history import Series, Snapshot

#: More intervals than this cannot be told apart in a chart.
_MOST = 120


@dataclass(frozen=True, eq=False)
class TimeShares:
    """Shares of this peer's time, which add up to 1, for one interval after the other; each ends with an epoch.

    :param starts: of the intervals, in seconds
    :param ends: likewise
    :param computing: all that is neither of the others: batches, but also the wait for data, and validation
    :param averaging: training stood still in the optimizer's steps: for what of matchmaking, averaging and updates did
      not go on in the background, or for a download of the state
    :param waiting: training stood still for a round that failed in the end
    """

    starts: np.ndarray
    ends: np.ndarray
    computing: np.ndarray
    averaging: np.ndarray
    waiting: np.ndarray


def time_shares(snapshot: Snapshot) -> TimeShares | None:
    """From the series ``stalled_seconds`` and ``waiting_seconds`` of a history; ``None`` before the first epoch.

    A start of the run, or a pause, begins a new interval: the time between does not count.
    """
    stalled = snapshot.series.get("stalled_seconds")
    if stalled is None or len(stalled) == 0:
        return None
    ends = stalled.times
    marks = np.array([event.time for event in snapshot.events if event.kind == "run"])
    starts = np.concatenate([[0.0], ends[:-1]])
    if len(marks):
        last = np.searchsorted(marks, ends, side="right") - 1
        starts = np.where(last >= 0, np.maximum(starts, marks[np.maximum(last, 0)]), starts)
    seconds = np.maximum(ends - starts, 1e-9)
    still = np.minimum(_sums(stalled), seconds)
    waiting = snapshot.series.get("waiting_seconds")
    waited = np.minimum(_sums(waiting), still) if waiting is not None and len(waiting) == len(ends) else 0.0 * still
    first = _firsts(starts, ends)
    total, still, waited = (np.add.reduceat(values, first) for values in (seconds, still, waited))
    return TimeShares(
        starts=starts[first],
        ends=ends[np.append(first[1:] - 1, len(ends) - 1)],
        computing=1 - still / total,
        averaging=(still - waited) / total,
        waiting=waited / total,
    )


def _firsts(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Where to begin to take neighbours together, so that hardly more remain than a chart can show; not over a stop."""
    places = np.arange(len(ends))
    after_stop = np.append(True, starts[1:] > ends[:-1])
    since_stop = places - np.maximum.accumulate(np.where(after_stop, places, 0))
    return np.flatnonzero(since_stop % -(-len(ends) // _MOST) == 0)


def _sums(series: Series) -> np.ndarray:
    return np.nan_to_num(series.values) * series.counts
