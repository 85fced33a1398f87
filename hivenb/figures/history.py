"""What a run has seen so far: bounded series of numbers and a list of events.

Training threads write, any number of views read. A view gets a :class:`Snapshot` that never changes, so text,
picture, widget and dataframe drawn from one snapshot always agree.
"""

from __future__ import annotations

import math
import time as _time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from threading import Lock
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from hivenb.errors import HivenbError, MissingDependencyError

if TYPE_CHECKING:
    import pandas as pd

#: What an event of a history may be about.
EVENT_KINDS = ("run", "option", "peer", "round", "batch", "rollback")
MAX_EVENTS = 500

#: Seconds between an earlier run and the next, as they are shown; what really was between them is of no interest.
APART = 1.0

MAX_SERIES = 64

#: One point of a series, as it is kept.
_POINT = np.dtype(
    [
        ("time", np.float64),
        ("epoch", np.int64),
        ("samples", np.int64),
        ("mean", np.float64),
        ("low", np.float64),
        ("high", np.float64),
        ("count", np.int64),
    ]
)
_Point = tuple[float, int, int, float, float, float, int]


@dataclass(frozen=True)
class OptionChange:
    """That an option of a run has become another.

    :param name: of the option
    :param before: its value until then
    :param after: its value from then on
    """

    name: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Event:
    """Something that happened at one moment and deserves a mark on the chart.

    :param time: seconds since the history's ``started_at``
    :param kind: one of :data:`EVENT_KINDS`
    :param text: a few words
    :param change: of an option, where it is one; a pickled event has none, as values of options can be of any kind
    :param breaks_trend: whether the loss after it is not to be compared with that before, as the run began, went on
      from elsewhere, or returned; a pickled event does not say so
    """

    time: float
    kind: str
    text: str
    change: OptionChange | None = field(default=None, compare=False, repr=False)
    breaks_trend: bool = field(default=False, compare=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return Event, (self.time, self.kind, self.text)


@dataclass(frozen=True, eq=False)
class Series:
    """One named series. All arrays have the same length and are read-only.

    A point stands for one recorded value, or, in a long series, for a bucket of neighbours: ``values`` is
    then their mean, ``lows`` and ``highs`` their extremes, and the rest is that of the bucket's last value.

    :param times: seconds since the history's ``started_at``
    :param epochs: swarm epochs done
    :param samples: samples that the recorder counted at that point
    :param counts: how many finite values each point stands for
    """

    name: str
    times: np.ndarray
    epochs: np.ndarray
    samples: np.ndarray
    values: np.ndarray
    lows: np.ndarray
    highs: np.ndarray
    counts: np.ndarray

    def __len__(self) -> int:
        return len(self.times)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A history at one moment; it never changes.

    :param version: the history's version at that moment
    :param started_at: unix time, in seconds, of the first thing recorded; all other times count from here
    :param series: name to :class:`Series`
    :param events: oldest first
    :param earlier: what runs of the same name have left before this one, as one history; ``None`` if nothing is known
    """

    version: int
    started_at: float
    series: Mapping[str, Series]
    events: tuple[Event, ...]
    _last: Mapping[str, float] = field(repr=False)
    earlier: Snapshot | None = field(default=None, repr=False)

    @property
    def end(self) -> float:
        """Seconds from its beginning to what was recorded last."""
        times = (float(one.times[-1]) for one in self.series.values() if len(one))
        return max([0.0, *times, *(event.time for event in self.events)])

    def last(self, name: str) -> float | None:
        """The value recorded last under ``name`` (itself, not a bucket's mean), or None if there is none."""
        return self._last.get(name)

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle, which does not take read-only views of dicts."""
        return Snapshot, (self.version, self.started_at, dict(self.series), self.events, dict(self._last), self.earlier)


def require_pandas() -> Any:
    """pandas, which only those need who want a table.

    :raises MissingDependencyError: when it is not installed
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise MissingDependencyError(
            "to_dataframe() needs pandas, which is not installed: pip install pandas. "
            "Without it, a history's snapshot().series holds the same numbers as numpy arrays."
        ) from error
    return pd


class History:
    """Bounded, thread-safe series and events of one run.

    :param capacity: points kept per series, at least 2. When a series is full, neighbours are merged two by
        two and from then on each point stands for twice as many values: a series always spans the whole run. Each
        point takes 56 bytes, from the first value of its series on.
    :raises HivenbError: when ``capacity`` is less than 2
    """

    def __init__(self, capacity: int = 2048) -> None:
        if capacity < 2:
            raise HivenbError(f"capacity={capacity!r} is too small for a history; use 2 or more (2048 is usual).")
        self._capacity = capacity + capacity % 2
        self._lock = Lock()
        self._version = 0
        self._started_at: float | None = None
        self._created_at = _time.time()
        self._series: dict[str, _Buckets] = {}
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._overflowed = False
        self._snapshot: Snapshot | None = None
        self._earlier: Snapshot | None = None

    @property
    def earlier(self) -> Snapshot | None:
        """What runs of the same name have left before this one, as one history; ``None`` if nothing is known."""
        return self._earlier

    def begin_after(self, earlier: Snapshot | None) -> None:
        """Show from now on what was before.

        :param earlier: histories of earlier runs, as one
        """
        with self._lock:
            self._earlier = earlier
            self._version += 1

    @property
    def version(self) -> int:
        """A number that grows with every change."""
        return self._version

    def record(self, name: str, value: float, *, epoch: int = 0, samples: int = 0, time: float | None = None) -> None:
        """Add one value to a series; the series is made at its first value.

        A run may have at most 64 series: values of further ones are left out, and one event says so.

        :param name: of the series, for example ``"loss"``
        :param value: anything that ``float`` takes
        :param epoch: swarm epochs done
        :param samples: samples counted so far, by whatever count the recorder keeps
        :param time: unix time in seconds; now by default
        """
        number = float(value)
        with self._lock:
            if time is None:
                time = _time.time()
            if self._started_at is None:
                self._started_at = time
            buckets = self._series.get(name)
            if buckets is None:
                if len(self._series) >= MAX_SERIES:
                    self._note_overflow(name, time)
                    return
                buckets = self._series[name] = _Buckets(name, self._capacity)
            buckets.add(number, epoch, samples, time - self._started_at)
            self._version += 1

    def mark(
        self,
        kind: str,
        text: str,
        *,
        time: float | None = None,
        change: OptionChange | None = None,
        breaks_trend: bool = False,
    ) -> None:
        """Note an event. The newest 500 are kept.

        :param kind: one of :data:`EVENT_KINDS`
        :param text: a few words, such as ``"float16 gradients"``
        :param time: unix time in seconds; now by default
        :param change: of an option, where it is one
        :param breaks_trend: whether the loss after it is not to be compared with that before
        :raises HivenbError: when the kind is none of these
        """
        if kind not in EVENT_KINDS:
            raise HivenbError(f"kind={kind!r} is no kind of event; use one of {', '.join(EVENT_KINDS)}.")
        with self._lock:
            if time is None:
                time = _time.time()
            if self._started_at is None:
                self._started_at = time
            self._events.append(Event(time, kind, str(text), change, breaks_trend))
            self._version += 1

    def snapshot(self) -> Snapshot:
        """All that is known now, as a value that never changes. Cheap, and free while nothing has changed."""
        with self._lock:
            if self._snapshot is None or self._snapshot.version != self._version:
                start = self._created_at if self._started_at is None else self._started_at
                self._snapshot = Snapshot(
                    version=self._version,
                    started_at=start,
                    series=MappingProxyType({name: b.series() for name, b in self._series.items()}),
                    events=tuple(replace(event, time=event.time - start) for event in self._events),
                    _last=MappingProxyType({name: b.last for name, b in self._series.items()}),
                    earlier=self._earlier,
                )
            return self._snapshot

    def to_dataframe(self) -> pd.DataFrame:
        """All series in one long table, those of earlier runs of the same name first.

        :returns: pandas.DataFrame with the columns ``time`` (seconds since the run's first record; less than 0 before
          it, where one run follows another without a break), ``name``, ``value``, ``epoch``, ``samples``, and
          ``earlier``, whether it is of an earlier run; a row for each kept point, series after series
        :raises MissingDependencyError: when pandas is not installed
        """
        pd = require_pandas()
        snapshot = self.snapshot()
        present = list(snapshot.series.values())
        before = [] if snapshot.earlier is None else list(snapshot.earlier.series.values())
        shift = 0.0 if snapshot.earlier is None else snapshot.earlier.end + APART
        series = [*before, *present]
        columns: dict[str, Any] = {
            "time": _joined([*(s.times - shift for s in before), *(s.times for s in present)], np.float64),
            "name": [s.name for s in series for _ in range(len(s))],
            "value": _joined([s.values for s in series], np.float64),
            "epoch": _joined([s.epochs for s in series], np.int64),
            "samples": _joined([s.samples for s in series], np.int64),
            "earlier": _joined([np.full(len(s), s_is_before) for s_is_before, s in _marked(before, present)], np.bool_),
        }
        return pd.DataFrame(columns)

    def __repr__(self) -> str:
        with self._lock:
            names = sorted(self._series)
        return f"History({', '.join(names)})" if names else "History(empty)"

    def _note_overflow(self, name: str, time: float) -> None:
        if not self._overflowed:
            self._overflowed = True
            self._events.append(Event(time, "run", f"more than {MAX_SERIES} series: {name} and others left out"))
            self._version += 1


class _Buckets:
    """The points of one series: closed buckets as rows of an array, and one that is still being filled.

    A closed bucket never changes: who looks at the series sees these rows themselves, and takes no memory for them.
    """

    __slots__ = ("_filled", "_name", "_open", "_rows", "_seen", "_stride", "_taken", "last")

    def __init__(self, name: str, capacity: int) -> None:
        self._name = name
        self._rows = _empty_rows(capacity)
        self._filled = 0
        self._stride = 1  # values per closed bucket
        self._taken = 0  # values in the open one
        self._open: _Point = (0.0, 0, 0, 0.0, 0.0, 0.0, 0)
        self._seen: Series | None = None
        self.last = math.nan

    def add(self, value: float, epoch: int, samples: int, time: float) -> None:
        self.last = value
        self._seen = None
        if self._taken == 0:
            self._open = (time, epoch, samples, value, value, value, int(math.isfinite(value)))
        else:
            self._open = _extended(self._open, value, epoch, samples, time)
        self._taken += 1
        if self._taken == self._stride:
            self._close_bucket()

    def _close_bucket(self) -> None:
        if self._filled == len(self._rows):
            halves = _merged_pairs(self._rows)
            self._rows = _empty_rows(len(self._rows))  # the old ones may be looked at
            self._filled = len(halves)
            self._rows[: self._filled] = halves
            self._stride *= 2
            # The bucket at hand is now half of a larger one: leave it open.
            return
        self._rows[self._filled] = self._open
        self._filled += 1
        self._taken = 0

    def series(self) -> Series:
        if self._seen is None:
            rows = self._rows[: self._filled]
            if self._taken:
                rows = np.append(rows, np.array([self._open], dtype=_POINT))
            self._seen = Series(
                name=self._name,
                times=_frozen(rows["time"]),
                epochs=_frozen(rows["epoch"]),
                samples=_frozen(rows["samples"]),
                values=_frozen(rows["mean"]),
                lows=_frozen(rows["low"]),
                highs=_frozen(rows["high"]),
                counts=_frozen(rows["count"]),
            )
        return self._seen


def _empty_rows(number: int) -> np.ndarray:
    """Written to, so that all of their memory is taken at once: what grows for an hour looks like a leak."""
    return np.full(number, 0, dtype=_POINT)


def _extended(bucket: _Point, value: float, epoch: int, samples: int, time: float) -> _Point:
    _, _, _, mean, low, high, count = bucket
    if not math.isfinite(value):
        # One diverged batch must not wipe out its finite neighbours; Snapshot.last still reports it.
        return (time, epoch, samples, mean, low, high, count)
    if count == 0:
        return (time, epoch, samples, value, value, value, 1)
    mean += (value - mean) / (count + 1)
    return (time, epoch, samples, mean, min(low, value), max(high, value), count + 1)


def _merged_pairs(rows: np.ndarray) -> np.ndarray:
    """Half as many rows, each made of two neighbours."""
    left, right = rows[0::2], rows[1::2]
    merged = right.copy()
    merged["count"] += left["count"]
    both = (left["count"] > 0) & (right["count"] > 0)
    only_left = (left["count"] > 0) & (right["count"] == 0)
    for name in ("mean", "low", "high"):
        merged[name][only_left] = left[name][only_left]
    weight = right["count"][both] / merged["count"][both]
    merged["mean"][both] = left["mean"][both] * (1 - weight) + right["mean"][both] * weight
    merged["low"][both] = np.minimum(left["low"][both], right["low"][both])
    merged["high"][both] = np.maximum(left["high"][both], right["high"][both])
    return merged


def _frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def _marked(before: list[Series], present: list[Series]) -> list[tuple[bool, Series]]:
    return [*((True, one) for one in before), *((False, one) for one in present)]


def _joined(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=dtype)
