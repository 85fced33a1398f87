"""What the dashboard's picture shows: which series go into which panel, and between which limits.

Nothing here draws; :mod:`hivenb.view.charts` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hivenb.history import Event, Series, Snapshot
from hivenb.view import theme, words


@dataclass(frozen=True)
class Line:
    """One line of a panel; ``word`` and ``latest`` are written beside the panel's title, in its colour."""

    series: Series
    color: str
    word: str
    latest: str
    smooth: bool = False
    step: bool = False


@dataclass(frozen=True)
class Panel:
    """What one panel shows. ``empty`` is written in it while it has no line; ``marks`` are the kinds of event
    whose words it carries (the thin lines of all events go through all panels)."""

    title: str
    lines: tuple[Line, ...]
    empty: str = ""
    marks: tuple[str, ...] = ()
    from_zero: bool = False
    whole: bool = False
    percent: bool = False


def panels(snapshot: Snapshot) -> tuple[tuple[Panel, Panel | None], tuple[Panel, Panel]]:
    """Two rows of two panels: loss and metric, peers and speed; no metric panel without a metric."""

    def line(name: str, color: str, word: str, write: Callable[[float], str], **how: bool) -> tuple[Line, ...]:
        series, last = snapshot.series.get(name), snapshot.last(name)
        if series is None or last is None:
            return ()
        return (Line(series, color, word, write(last), **how),)

    loss = Panel(
        "Loss",
        line("loss", theme.OWN, "training", words.value, smooth=True)
        + line("val_loss", theme.VALIDATION, "validation", words.value),
        "no training step yet: press Start, or call run.start()",
        marks=("run", "option", "round"),
    )
    metric = None
    name = _metric_name(snapshot)
    if name is not None:
        lines = line(name, theme.VALIDATION, "", lambda number: words.metric(name, number))
        percent = words.is_share(name) and all(_within_one(one.series) for one in lines)
        metric = Panel(words.title(name), lines, percent=percent)
    peers = Panel(
        "Peers",
        line("peers", theme.SWARM, "", lambda n: f"{words.counted(n, 'peer')} now", step=True),
        "no peers yet: send them the invite,\nor add two local ones",
        marks=("peer",),
        from_zero=True,
        whole=True,
    )
    speed = Panel(
        "Samples/s",
        line("swarm_samples_per_second", theme.SWARM, "swarm", words.count)
        + line("samples_per_second", theme.OWN, "this peer", words.count),
        "no samples yet",
        from_zero=True,
    )
    return (loss, metric), (peers, speed)


def with_gaps(times: np.ndarray, values: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same points with a nan where the run was started anew, so that no line crosses the time between.

    :param times: seconds
    :param values: as many
    :param starts: seconds
    """
    after = np.unique(np.searchsorted(times, starts))
    after = after[(after > 0) & (after < len(times))]
    return np.insert(times, after, times[after]), np.insert(values.astype(float), after, np.nan)


def merged(events: Sequence[Event], near: float) -> list[Event]:
    """Events of a kind that follow each other closely as one, so that its words can be read.

    :param events: oldest first
    :param near: seconds
    """
    groups: list[list[Event]] = []
    for event in events:
        last = groups[-1][-1] if groups else None
        if last is not None and last.kind == event.kind and event.time - last.time <= near:
            groups[-1].append(event)
        else:
            groups.append([event])
    return [group[0] if len(group) == 1 else Event(group[0].time, group[0].kind, _together(group)) for group in groups]


def _together(events: Sequence[Event]) -> str:
    words_for = {"option": "options changed", "peer": "peers came or went", "round": "marks on rounds"}
    kind = events[0].kind
    return f"{len(events)} {words_for[kind]}" if kind in words_for else events[-1].text


def _metric_name(snapshot: Snapshot) -> str | None:
    """The metric with a panel of its own: validation accuracy, else any other of validation."""
    names = [name for name in snapshot.series if name.startswith("val_") and name != "val_loss"]
    return "val_acc" if "val_acc" in names else next(iter(names), None)


def limits(panel: Panel) -> tuple[float, float]:
    """Lowest and highest value of the panel's vertical axis, with some room; ``low < high``."""
    lows, highs = [], []
    for line in panel.lines:
        values = line.series.values
        if line.smooth and len(values) >= 40:
            # A few wild batches must not squeeze the rest of the curve into a corner.
            values = np.concatenate([smoothed(values), _inner(values)])
        low, high = _span(values)
        lows.append(low)
        highs.append(high)
    low, high = min(lows), max(highs)
    if panel.whole:
        return 0.0, max(high, 1.0) * 1.15 + 0.1
    if panel.from_zero:
        return 0.0, (high if high > 0 else 1.0) * 1.12
    room = 0.08 * (high - low) or 0.1 * abs(high) or 0.1
    if panel.percent:
        return max(0.0, low - room), min(1.0, high + room) if high < 1 else 1.0
    # A loss is hardly ever negative: an axis that dips below zero would suggest that it can be.
    return (low - room if low < 0 else max(0.0, low - room)), high + room


def _inner(values: np.ndarray) -> np.ndarray:
    known = values[np.isfinite(values)]
    return np.quantile(known, [0.01, 0.99]) if len(known) else known


def smoothed(values: np.ndarray) -> np.ndarray:
    """A centred moving average over about a twentieth of the series; gaps (nan) stay out of it.

    :param values: at least one
    :returns: as many values, averaged over less towards both ends; a short series stays as it is
    """
    half = min(len(values) // 40, 40)
    if half == 0:
        return values
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    places = np.arange(len(values))
    first, last = np.maximum(places - half, 0), np.minimum(places + half + 1, len(values))
    counted = counts[last] - counts[first]
    return np.where(counted > 0, (sums[last] - sums[first]) / np.maximum(counted, 1), np.nan)


def _within_one(series: Series) -> bool:
    return _span(series.lows)[0] >= 0 and _span(series.highs)[1] <= 1


def _span(values: np.ndarray) -> tuple[float, float]:
    known = values[np.isfinite(values)]
    return (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
