"""What the dashboard's picture shows: which series go into which panel, and between which limits.

Nothing here draws; :mod:`hivenb.view.charts.drawing` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hivenb.figures.history import Series, Snapshot
from hivenb.figures.measured_traffic import per_epoch
from hivenb.figures.metric_names import is_of_validation, is_share, is_validation_loss, validation_loss_among
from hivenb.view import empty_states, formats, theme
from hivenb.view.empty_states import ANY_TIME, Situation

# -- horizontal axis -------------------------------------------------------------------------------------------------
#
# What a chart is drawn against: time, swarm epochs, or samples of this peer.


AXES = ("time", "epochs", "samples")

ToAxis = Callable[[np.ndarray], np.ndarray]


def to_axis(snapshot: Snapshot, axis: str) -> ToAxis:
    """A function from seconds since the run's first record to epochs or samples, as the training loss tells them.

    Between two changes of the epoch it goes on evenly. Without a loss everything is at 0.

    :param snapshot: of the run's history
    :param axis: one of :data:`AXES`
    """
    if axis == "time":
        return lambda times: times
    loss = snapshot.series.get("loss")
    if loss is None or len(loss) == 0:
        return np.zeros_like
    if axis == "samples":
        samples = np.maximum.accumulate(loss.samples).astype(float)
        return lambda times: np.interp(times, loss.times, samples)
    epochs = np.maximum.accumulate(loss.epochs)
    changes = np.append(0, np.flatnonzero(np.diff(epochs)) + 1)
    places, values = loss.times[changes], epochs[changes].astype(float)
    # the last epoch has not ended: as fast as the one before, but not to its end
    rate = (values[-1] - values[-2]) / max(places[-1] - places[-2], 1e-9) if len(changes) > 1 else 0.0
    lasted = loss.times[-1] - places[-1]
    places, values = np.append(places, loss.times[-1]), np.append(values, values[-1] + min(0.95, rate * lasted))
    return lambda times: np.interp(times, places, values)


def to_time(snapshot: Snapshot, axis: str, place: float) -> float:
    """Seconds since the run's first record at a place on an axis: the other way round.

    :param snapshot: of the run's history
    :param axis: one of :data:`AXES`
    :param place: epochs or samples; beyond what there is, the time of the first or the last of it
    """
    loss = snapshot.series.get("loss")
    if axis == "time" or loss is None or len(loss) == 0:
        return place
    return float(np.interp(place, to_axis(snapshot, axis)(loss.times), loss.times))


# -- time shares -----------------------------------------------------------------------------------------------------
#
# What a run's time went into.


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


# -- panels ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Points:
    """What a line goes through, and the extremes of what each point stands for; arrays of one length.

    :param times: seconds since the run's first record
    """

    times: np.ndarray
    values: np.ndarray
    lows: np.ndarray
    highs: np.ndarray

    def __getitem__(self, part: slice) -> Points:
        return Points(self.times[part], self.values[part], self.lows[part], self.highs[part])

    @classmethod
    def single(cls, times: np.ndarray, values: np.ndarray) -> Points:
        """Each stands for one value."""
        return cls(times, values, values, values)


@dataclass(frozen=True, eq=False)
class Line:
    """One line of a panel; ``word`` and ``latest`` are written beside the panel's title, in its colour.

    :param trend: its smoothed values, if it is to be smoothed
    :param hidden: it is switched off
    """

    points: Points
    color: str
    word: str
    latest: str
    smooth: bool = False
    step: bool = False
    dashed: bool = False
    trend: np.ndarray | None = None
    hidden: bool = False


@dataclass(frozen=True)
class Panel:
    """What one panel shows. ``empty`` is written in it while it has no line; ``marks`` are the kinds of event
    whose words it carries (the thin lines of all events go through all panels).

    :param axis: what it is drawn against, one of :data:`hivenb.view.charts.panels.AXES`
    :param stacked: the lines are shares of one, drawn on top of each other
    """

    title: str
    lines: tuple[Line, ...]
    empty: str = ""
    marks: tuple[str, ...] = ()
    from_zero: bool = False
    whole: bool = False
    percent: bool = False
    log: bool = False
    bytes: bool = False
    stacked: bool = False
    axis: str = "time"


def panels(
    snapshot: Snapshot, axis: str = "time", log: bool = False, now: Situation = ANY_TIME
) -> tuple[tuple[Panel, ...], ...]:
    """Rows of panels: loss and metric (if there is one); peers and speed; time, traffic and memory.

    :param snapshot: of the run's history
    :param axis: what loss and metric are drawn against; all else is drawn against time
    :param log: a logarithmic scale for the loss
    :param now: where the run stands, which decides what is said in place of lines
    """
    validation_loss = validation_loss_among(snapshot.series) or "val_loss"
    loss = Panel(
        "Loss",
        _line(snapshot, "loss", theme.OWN, "training", formats.value, smooth=True)
        + _line(snapshot, validation_loss, theme.VALIDATION, "validation", formats.value),
        empty_states.no_loss(now),
        marks=("run", "option", "round", "batch", "rollback"),
        log=log,
        axis=axis,
    )
    learning = [loss]
    name = _metric_name(snapshot)
    if name is not None:
        lines = _line(snapshot, name, theme.VALIDATION, "", lambda number: formats.metric(name, number))
        percent = is_share(name) and all(_within_one(one) for one in lines)
        learning.append(Panel(formats.title(name), lines, percent=percent, axis=axis))
    peers = Panel(
        "Peers",
        _line(snapshot, "peers", theme.SWARM, "", lambda n: formats.counted(n, "peer"), step=True),
        empty_states.no_peers_drawn(now),
        marks=("peer",),
        from_zero=True,
        whole=True,
    )
    speed = Panel(
        "Samples/s",
        _line(snapshot, "swarm_samples_per_second", theme.SWARM, "swarm", formats.count)
        + _line(snapshot, "samples_per_second", theme.OWN, "this peer", formats.count),
        empty_states.none_of("samples", now),
        from_zero=True,
    )
    return (
        tuple(learning),
        (peers, speed),
        (
            _time_panel(snapshot, now),
            _traffic_panel(snapshot, now),
            _memory_panel(snapshot, now),
        ),
    )


def _time_panel(snapshot: Snapshot, now: Situation) -> Panel:
    found = time_shares(snapshot)
    lines: list[Line] = []
    if found is not None:
        # at the left edge of each interval, and at the end of the last one before a stop
        stops = np.flatnonzero(np.append(found.starts[1:] > found.ends[:-1], True))
        times = np.insert(found.starts, stops + 1, found.ends[stops])
        for word, color in (("computing", theme.COMPUTING), ("averaging", theme.AVERAGING), ("waiting", theme.WAITING)):
            share = getattr(found, word)
            if word == "waiting" and not share.any():
                continue  # the usual case needs no word
            values = np.insert(share, stops + 1, np.nan)
            lines.append(Line(Points.single(times, values), color, word, f"{100 * share[-1]:.0f} %", step=True))
    return Panel("Time", tuple(lines), empty_states.none_of("epoch", now), percent=True, stacked=True)


def _traffic_panel(snapshot: Snapshot, now: Situation) -> Panel:
    lines: list[Line] = []
    for name, word, color in (("bytes_received", "in", theme.SWARM), ("bytes_sent", "out", theme.OWN)):
        if name in snapshot.series:
            times, _, growth = per_epoch(snapshot.series[name])
            if len(times):
                latest = formats.size(growth[-1])
                lines.append(Line(Points.single(times, growth), color, word, latest, dashed=word == "out"))
    unknown = "peers" in snapshot.series and "bytes_sent" not in snapshot.series
    empty = "traffic cannot be\nmeasured on this machine" if unknown else empty_states.none_of("epoch", now)
    return Panel("Bytes/epoch", tuple(lines), empty, from_zero=True, bytes=True)


def _memory_panel(snapshot: Snapshot, now: Situation) -> Panel:
    has_gpu = "gpu_memory" in snapshot.series
    lines = _line(snapshot, "memory", theme.OWN, "host" if has_gpu else "", formats.size)
    lines += _line(snapshot, "gpu_memory", theme.GPU, "GPU", formats.size)
    return Panel("Memory", lines, "not measured" if now.is_over else "not measured yet", from_zero=True, bytes=True)


def _line(
    snapshot: Snapshot, name: str, color: str, word: str, write: Callable[[float], str], **how: Any
) -> tuple[Line, ...]:
    series, last = snapshot.series.get(name), snapshot.last(name)
    if series is None or last is None:
        return ()
    points = Points(series.times, series.values, series.lows, series.highs)
    return (Line(points, color, word, write(last), **how),)


#: From one point to the next, seconds on an axis of time, beyond which there is a gap where a run stood still.
_GAP = 2.0


def with_gaps(
    times: np.ndarray, values: np.ndarray, starts: np.ndarray, held: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """The same points with a nan where the run stood still, so that no line crosses the time between.

    What goes on meanwhile, as the number of peers does in a pause, has no gap there.


    :param times: seconds
    :param values: as many
    :param starts: seconds
    :param held: each value holds until the next point, so that the nan has to be where the last one is
    """
    after = np.unique(np.searchsorted(times, starts))
    after = after[(after > 0) & (after < len(times))]
    after = after[times[after] - times[after - 1] > _GAP]
    return np.insert(times, after, times[after - held]), np.insert(values.astype(float), after, np.nan)


def _metric_name(snapshot: Snapshot) -> str | None:
    """The metric with a panel of its own: validation accuracy, else any other of validation."""
    names = [name for name in snapshot.series if is_of_validation(name) and not is_validation_loss(name)]
    return min(names, key=lambda name: ("acc" not in name.lower(), not is_share(name)), default=None)


def limits(panel: Panel) -> tuple[float, float]:
    """Lowest and highest value of the panel's vertical axis, with some room; ``low < high``."""
    lows, highs = [], []
    if panel.stacked:
        return 0.0, 1.0
    for line in panel.lines:
        values = line.points.values
        if line.hidden or len(values) == 0:
            continue
        if line.smooth and len(values) >= 40:
            # A few wild batches must not squeeze the rest of the curve into a corner.
            trend = smoothed(values) if line.trend is None else line.trend
            values = np.concatenate([trend, _inner(values)])
        if panel.log:
            values = logarithm(values)
        low, high = _span(values)
        lows.append(low)
        highs.append(high)
    low, high = min(lows, default=0.0), max(highs, default=1.0)
    if panel.whole:
        return 0.0, max(high, 1.0) * 1.15 + 0.1
    if panel.from_zero:
        return 0.0, (high if high > 0 else 1.0) * 1.12
    if panel.log:
        room = 0.06 * (high - low) or 0.1
        return low - room, high + room
    room = 0.08 * (high - low) or 0.1 * abs(high) or 0.1
    if panel.percent:
        return max(0.0, low - room), min(1.0, high + room) if high < 1 else 1.0
    # A loss is hardly ever negative: an axis that dips below zero would suggest that it can be.
    return (low - room if low < 0 else max(0.0, low - room)), high + room


def logarithm(values: np.ndarray) -> np.ndarray:
    """To base 10; nan where there is none."""
    positive = np.where(np.isfinite(values) & (values > 0), values, 1.0)
    return np.where(np.isfinite(values) & (values > 0), np.log10(positive), np.nan)


def _inner(values: np.ndarray) -> np.ndarray:
    known = values[np.isfinite(values)]
    return np.quantile(known, [0.01, 0.99]) if len(known) else known


#: How many times as wide as usual a line is averaged, by the word that a person chooses.
SMOOTHING = {"none": 0, "some": 1, "strong": 3}


def smoothed(values: np.ndarray, breaks: Sequence[int] | np.ndarray = (), strength: int = 1) -> np.ndarray:
    """A centred moving average, with weights of a bell that is about a tenth of the series wide; a spike stays a peak.

    Gaps (nan) stay out of it.

    :param values: at least one
    :param breaks: places over which nothing is averaged: the first value after each stop of the run
    :param strength: how many times as wide as that the bell is; 0 leaves all as it is
    :returns: as many values, averaged over less towards both ends; a series of a few values stays as it is
    """
    half = int(2 * strength * min(len(values) / 40, 40))
    if half == 0:
        return values
    bell = np.hanning(2 * half + 1)[1:-1]
    return np.concatenate([_averaged(part, bell) for part in np.split(values, np.unique(breaks)) if len(part)])


def _averaged(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    known = np.isfinite(values)
    # numbers of one size, so that huge ones do not overflow on their way
    size = float(np.abs(values[known]).max(initial=0.0)) or 1.0
    half = len(weights) // 2
    sums = np.convolve(np.where(known, values, 0.0) / size, weights)[half : half + len(values)]
    total = np.convolve(known.astype(float), weights)[half : half + len(values)]
    return np.where(total > 1e-9, sums / np.maximum(total, 1e-9) * size, np.nan)


def _within_one(line: Line) -> bool:
    return _span(line.points.lows)[0] >= 0 and _span(line.points.highs)[1] <= 1


def _span(values: np.ndarray) -> tuple[float, float]:
    known = values[np.isfinite(values)]
    return (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)


# -- chart choice ----------------------------------------------------------------------------------------------------
#
# What a person has chosen about the charts, and what becomes of a panel by it.


#: Pixels of the page that a picture takes where no page has told how much room there is, and the least and most.
WIDTH, NARROWEST, WIDEST = 650, 360, 900


@dataclass(frozen=True)
class ChartChoice:
    """How charts are to be drawn.

    :param axis: what loss and metric are drawn against, one of :data:`hivenb.view.charts.panels.AXES`
    :param log: a logarithmic scale for the loss
    :param dark: light ink on dark paper
    :param smoothing: one of :data:`hivenb.view.charts.panels.SMOOTHING`
    :param hidden: series that are switched off, as :func:`key` names them
    :param window: seconds from and to which is drawn; ``None`` for all of the run
    :param width: pixels of the page, from :data:`NARROWEST` to :data:`WIDEST`, that the picture has there
    """

    axis: str = "time"
    log: bool = False
    dark: bool = False
    smoothing: str = "some"
    hidden: frozenset[str] = frozenset()
    window: tuple[float, float] | None = None
    width: int = WIDTH


def key(panel: Panel, line: Line) -> str:
    """The name of a series among all of the picture; the same for all pictures."""
    return f"{panel.title}/{line.word}"


def as_chosen(panel: Panel, choice: ChartChoice, starts: np.ndarray) -> Panel:
    """The panel with its lines switched off, smoothed, and cut to the window as they were chosen to be.

    :param starts: when the run was started, in seconds: nothing is smoothed across
    """
    lines = []
    for line in panel.lines:
        values, strength = line.points.values, SMOOTHING[choice.smoothing]
        trend = None
        # few values are what they are, unless a person asks for more
        if line.smooth and strength and (len(values) >= 40 or strength > 1):
            # of all of it: it stays the same when one zooms in
            trend = smoothed(values, np.searchsorted(line.points.times, starts), strength)
        part = _inside(line.points.times, choice.window)
        lines.append(
            replace(
                line,
                points=line.points[part],
                trend=None if trend is None else trend[part],
                hidden=key(panel, line) in choice.hidden,
            )
        )
    return replace(panel, lines=tuple(lines))


def _inside(times: np.ndarray, window: tuple[float, float] | None) -> slice:
    """Which points lie in the window, and one more at each side: lines go on to the edge."""
    if window is None:
        return slice(None)
    first, last = window
    return slice(max(0, int(np.searchsorted(times, first)) - 1), int(np.searchsorted(times, last, side="right")) + 1)
