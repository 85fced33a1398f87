"""Whether the loss has risen since an option was changed: against its own trend, beyond its noise, within some epochs.

What is compared are means over swarm epochs, or single points where these are longer. To say nothing is better than to
blame a change that has done no harm, so a rise has to pass each of these bounds:

- it is more than a share of the loss, and more than a multiple of the noise around the trend before the change;
- it is larger than any that this run has seen within as many epochs without a change;
- the learning rate has not risen meanwhile.

A loss that falls more slowly than before is no rise. Importing this module imports neither torch nor hivemind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hivenb.figures.history import Event, OptionChange, Series, Snapshot
from hivenb.options.options import FIELDS, Options

#: The series of a history that has the largest learning rate of a run, wherever it changes.
LEARNING_RATE = "largest_learning_rate"

#: Epochs before a change without which it is not judged, and those at most that make up its trend.
LEAST_BEFORE, MOST_BEFORE = 16, 40

#: Epochs after a change within which the loss has to rise for the change to be blamed.
WITHIN = 40

#: Epochs before a change whose rises without a change count: one that exploded long ago is no measure for good.
LOOKED_BACK = 400

#: Epochs whose median is a level: no outlier among them counts. Where the loss is noisy, it takes the more of them.
LEVEL, LONG_LEVEL = 7, 21

#: By which factor a loss has to rise at least; by how many times its noise; and by how many times the largest rise
#: without a change. tests/benchmarks/loss_rises.py measures what becomes of them.
LEAST_FACTOR, TIMES_NOISE, TIMES_OTHERS = 1.15, 5.0, 1.25

#: The error of a median, by that of a mean.
_OF_MEDIAN = 1.25

#: By which factor the learning rate may grow.
SAME_RATE = 1.02

#: Options that make a learning rate of their own.
_RATES = ("scheduler_fn",)


@dataclass(frozen=True)
class LossRise:
    """A loss that has risen since options were changed.

    :param event: the mark of the change; of several, the last one's
    :param changes: what to hand to ``run.apply(**changes)`` to take it back: former values by option name
    :param values: those that are in force
    :param before: the loss at the change
    :param after: the loss by now
    :param epochs: swarm epochs from the change until the rise was certain
    """

    event: Event
    changes: Mapping[str, Any]
    values: Mapping[str, Any]
    before: float
    after: float
    epochs: int

    @property
    def text(self) -> str:
        """A sentence without its full stop, which begins in lower case."""
        since = " and ".join(_is(name, self.values[name], value) for name, value in self.changes.items())
        return f"since {since}, the loss went from {self.before:.3g} to {self.after:.3g}"


def _is(name: str, now: Any, before: Any) -> str:
    option = FIELDS[name]
    words, former = option.words(now), option.words(before)
    return f"{option.label} is {words}" + ("" if {words, former} == {"on", "off"} else f" instead of {former}")


def loss_rises(snapshot: Snapshot, options: Options) -> tuple[LossRise, ...]:
    """The changes of options since which the loss has risen, oldest first; mostly none.

    :param snapshot: of the run's history
    :param options: in force
    """
    loss = snapshot.series.get("loss")
    changed = [event for event in snapshot.events if event.change is not None]
    if loss is None or not changed:
        return ()
    marks = np.array([event.time for event in changed])
    beginnings = np.array(_beginnings(snapshot.events))
    epochs = _Epochs.of(loss, np.union1d(marks, beginnings))
    found = []
    groups = _groups(changed, epochs, beginnings)
    for index, group in enumerate(groups):
        changes = _to_take_back(group, options)
        if not changes or _has_returned(snapshot, group[-1].time):
            continue
        start = max([-math.inf, *beginnings[beginnings <= group[0].time]])
        end = min([math.inf, *beginnings[beginnings > group[-1].time]])
        if index:
            start = max(start, groups[index - 1][-1].time)
        if index + 1 < len(groups):
            end = min(end, groups[index + 1][0].time)
        rates = None if any(name in _RATES for name in changes) else snapshot.series.get(LEARNING_RATE)
        rise = _rise(epochs, (start, group[0].time), (group[-1].time, end), rates)
        if rise is not None:
            last = [event for event in group if event.change is not None and event.change.name in changes][-1]
            values = {name: getattr(options, name) for name in changes}
            found.append(LossRise(last, changes, values, *rise))
    return tuple(found)


# -- which changes ---------------------------------------------------------------------------------------------------


def _beginnings(events: Sequence[Event]) -> list[float]:
    """When the run began, or went on from elsewhere."""
    return [event.time for event in events if event.breaks_trend and event.kind != "rollback"]


def _has_returned(snapshot: Snapshot, since: float) -> bool:
    return any(event.breaks_trend and event.kind == "rollback" and event.time > since for event in snapshot.events)


def _groups(changed: Sequence[Event], epochs: _Epochs, beginnings: np.ndarray) -> list[list[Event]]:
    """Changes with too little between them to tell which one it was are one."""
    groups: list[list[Event]] = []
    for event in changed:
        last = groups[-1][-1].time if groups else -math.inf
        is_new_beginning = bool(np.any((beginnings > last) & (beginnings <= event.time)))
        if groups and not is_new_beginning and epochs.between(last, event.time) < LEAST_BEFORE:
            groups[-1].append(event)
        else:
            groups.append([event])
    return groups


def _to_take_back(group: Sequence[Event], options: Options) -> dict[str, Any]:
    """Former values of those options that are still what the changes have made of them."""
    first: dict[str, OptionChange] = {}
    last: dict[str, OptionChange] = {}
    for event in group:
        if event.change is not None:
            first.setdefault(event.change.name, event.change)
            last[event.change.name] = event.change
    found = {}
    for name, change in last.items():
        option, now = FIELDS[name], getattr(options, name)
        is_in_force = option.kind.key(now) == option.kind.key(change.after)
        if is_in_force and option.words(first[name].before) != option.words(now):
            found[name] = first[name].before
    return found


# -- the loss --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Epochs:
    """The loss by swarm epochs, none across a mark.

    :param times: of the last point of each
    :param numbers: of the swarm epochs
    :param values: the logarithm of the loss; the loss where it is not always above 0
    :param is_logarithm: which of them
    :param rises: the largest rise of the level within :data:`WITHIN` epochs to each of them, across no mark
    """

    times: np.ndarray
    numbers: np.ndarray
    values: np.ndarray
    is_logarithm: bool
    rises: np.ndarray

    @classmethod
    def of(cls, loss: Series, marks: np.ndarray) -> _Epochs:
        parts = np.searchsorted(marks, loss.times, side="left")
        # one with batches of both sides of a mark is of neither
        crosses = np.diff(parts, prepend=parts[:1]) != 0
        kept = np.isfinite(loss.values) & ~crosses
        times, numbers, parts = loss.times[kept], loss.epochs[kept], parts[kept]
        values, weights = loss.values[kept], np.maximum(loss.counts[kept], 1)
        if not len(times):
            return cls(times, numbers, values, False, values)
        first = np.flatnonzero((np.diff(numbers, prepend=numbers[0] - 1) != 0) | (np.diff(parts, prepend=-1) != 0))
        last = np.append(first[1:], len(times)) - 1
        means = np.add.reduceat(values * weights, first) / np.add.reduceat(weights, first)
        is_logarithm = bool(means.min() > 0)
        used = np.log(means) if is_logarithm else means
        return cls(times[last], numbers[last], used, is_logarithm, _largest_rises(used, parts[last]))

    def between(self, start: float, end: float) -> int:
        """How many there are between two moments."""
        return int(np.sum((self.times > start) & (self.times <= end)))

    def shown(self, value: float) -> float:
        """A value as the loss that it stands for."""
        return math.exp(value) if self.is_logarithm else value


def _levels(values: np.ndarray, length: int = LEVEL) -> np.ndarray:
    """Running medians of so many values each."""
    if len(values) < length:
        return np.zeros(0)
    return np.median(np.lib.stride_tricks.sliding_window_view(values, length), axis=1)


def _largest_rises(values: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """The largest rise between two levels of one part within so many epochs, to each epoch."""
    rises = np.zeros(len(values))
    levels = _levels(values)
    if len(levels):
        whole = parts[LEVEL - 1 :] == parts[: len(levels)]  # levels of one part
        for lag in range(1, min(WITHIN, len(levels) - 1) + 1):
            same = whole[lag:] & whole[:-lag] & (parts[LEVEL - 1 + lag :] == parts[: len(levels) - lag])
            rise = np.where(same, levels[lag:] - levels[:-lag], 0.0)
            np.maximum(rises[LEVEL - 1 + lag :], rise, out=rises[LEVEL - 1 + lag :])
    return rises


def _rise(
    epochs: _Epochs, before: tuple[float, float], after: tuple[float, float], rates: Series | None
) -> tuple[float, float, int] | None:
    """The loss before and by now, and after how many epochs it had risen; ``None`` if it has not.

    :param before: from when to when the trend is taken
    :param after: from when to when it may rise
    """
    past = np.flatnonzero((epochs.times > before[0]) & (epochs.times <= before[1]))
    later = np.flatnonzero((epochs.times > after[0]) & (epochs.times <= after[1]))[:WITHIN]
    since = np.flatnonzero(epochs.times > after[0])
    if len(past) < LEAST_BEFORE or len(later) < LEVEL:
        return None
    trend = epochs.values[past[-MOST_BEFORE:]]
    slope, end, noise = _fit(trend)
    base = max(end, float(np.median(trend[-LEVEL:])))
    least = math.log(LEAST_FACTOR) if epochs.is_logarithm else (LEAST_FACTOR - 1) * abs(base)
    usual = epochs.rises[: past[-1] + 1][-LOOKED_BACK:]
    least = max(least, TIMES_OTHERS * float(usual.max()))
    now = float(np.median(epochs.values[since[-LEVEL:]]))
    found = _first_above(epochs.values[later], base, max(slope, 0.0), least, noise)
    if found is None or now <= base + found[1] / 2:
        return None
    at = later[found[0]]
    if rates is not None and _rate_has_risen(rates, before[1], float(epochs.times[at])):
        return None
    passed = int(epochs.numbers[at] - epochs.numbers[later[0]]) + 1
    return epochs.shown(base), epochs.shown(now), passed


def _first_above(values: np.ndarray, base: float, slope: float, least: float, noise: float) -> tuple[int, float] | None:
    """At which value the level is above a line by more than what is least and the noise; and by how much it has to be.

    :param noise: of one value, as it was before
    """
    found = []
    for length in (LEVEL, LONG_LEVEL):
        levels = _levels(values, length)
        above = levels - base - slope * np.arange(length, length + len(levels))
        for index in np.flatnonzero(above > least):
            place = int(index) + length - 1
            # a change may add to the noise and leave the loss as it is
            both = math.hypot(noise, _noise_of_steps(values[: place + 1]))
            bound = max(least, TIMES_NOISE * _OF_MEDIAN * both / math.sqrt(length))
            if above[index] > bound:
                found.append((place, bound))
                break
    return min(found, default=None)


def _fit(values: np.ndarray) -> tuple[float, float, float]:
    """The slope of a line through values, its last value, and the noise of one around it.

    The line is that of Theil and Sen, the noise from quantiles of residuals, larger where neighbours are alike.
    """
    places = np.arange(len(values))
    left, right = np.triu_indices(len(values), 1)
    slope = float(np.median((values[right] - values[left]) / (right - left)))
    middle = float(np.median(values - slope * places))
    residuals = values - slope * places - middle
    # where few are high, they may come together by chance
    spread = max(1.4826 * float(np.median(np.abs(residuals))), float(np.quantile(residuals, 0.9)) / 1.28)
    clipped = np.clip(residuals, -3 * spread, 3 * spread)
    power = float(np.sum(clipped**2))
    alike = float(np.sum(clipped[1:] * clipped[:-1])) / power if power else 0.0
    alike = min(max(alike, 0.0), 0.9)
    return slope, middle + slope * float(places[-1]), spread * math.sqrt((1 + alike) / (1 - alike))


def _noise_of_steps(values: np.ndarray) -> float:
    """The noise of a value, from what lies between neighbours: no trend counts."""
    return 1.4826 * float(np.median(np.abs(np.diff(values)))) / math.sqrt(2)


def _rate_has_risen(rates: Series, since: float, until: float) -> bool:
    if not len(rates):
        return False
    first = max(int(np.searchsorted(rates.times, since, side="right")) - 1, 0)
    later = rates.highs[(rates.times > since) & (rates.times <= until)]
    return bool(np.any(later > SAME_RATE * rates.values[first]))
