"""What the newest rounds of a run came to, in a few figures that advice can be based on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hivenb.figures.history import Series, Snapshot

#: Rounds without which nothing is said, and those that are looked at: the newest ones.
LEAST_ROUNDS, MOST_ROUNDS = 8, 40

#: hivemind's documentation of ``matchmaking_time``: a group is full from this share of the peers on.
FULL_GROUP = 0.9


@dataclass(frozen=True)
class Rounds:
    """The newest rounds in which this peer was not alone.

    :param count: how many
    :param peers: that were there, on average
    :param group_size: peers that averaged together, on average
    :param incomplete: share of the rounds with too few of the peers, without those that failed
    :param failed: share of the rounds that failed
    :param stalled: seconds of each that training stood still, on average
    :param computing: seconds of training between two, as usual: a pause in between does not count
    :param epoch: seconds from one to the next, of the longer ones
    :param traffic: of one round; ``None`` if it was not measured
    """

    count: int
    peers: float
    group_size: float
    incomplete: float
    failed: float
    stalled: float
    computing: float
    epoch: float
    traffic: Traffic | None

    @property
    def stalled_share(self) -> float:
        """Share of the time that training stood still."""
        return self.stalled / max(self.stalled + self.computing, 1e-9)


def newest_rounds(snapshot: Snapshot) -> Rounds | None:
    """The newest rounds since an option was changed last, or None if there were too few to say anything.

    :param snapshot: of a run's history
    """
    sizes, stalls, peers = (snapshot.series.get(name) for name in ("group_size", "stalled_seconds", "peers"))
    if sizes is None or stalls is None or peers is None or abs(len(sizes) - len(stalls)) > 1:
        return None
    known = min(len(sizes), len(stalls))  # one may have been recorded already, and the other not yet
    if known < LEAST_ROUNDS:
        return None
    times = sizes.times[:known]
    weights = np.maximum(sizes.counts[:known], 1)  # in a very long run a point stands for several neighbouring rounds
    seconds = np.diff(times, prepend=np.nan) / weights

    present = _peers_at(times, peers)
    newest = max(LEAST_ROUNDS, int(np.sum(np.cumsum(weights[::-1]) <= MOST_ROUNDS)))
    recent = (np.arange(known) >= known - newest) & (times > _last_change(snapshot))
    chosen = np.flatnonzero(recent & (present >= 2))
    if len(chosen) < LEAST_ROUNDS:
        return None

    span = times[chosen[0]], times[chosen[-1]]
    between = int(weights[chosen[0] + 1 : chosen[-1] + 1].sum())
    weights, seconds, present = weights[chosen], seconds[chosen], present[chosen]
    failed = _failures_at(times, snapshot)[chosen] / weights
    incomplete = _share_below(FULL_GROUP * present - 1e-9, sizes, chosen)
    stalled = stalls.values[chosen]
    return Rounds(
        count=int(weights.sum()),
        peers=float(np.average(present, weights=weights)),
        group_size=float(np.average(sizes.values[chosen], weights=weights)),
        # a round that failed counts as a group of one
        incomplete=float(np.average(np.maximum(incomplete - failed, 0.0), weights=weights)),
        failed=float(np.average(np.minimum(failed, 1.0), weights=weights)),
        stalled=float(np.average(stalled, weights=weights)),
        computing=float(np.nanmedian(np.maximum(seconds - stalled, 0.0))),
        epoch=float(np.nanquantile(seconds, 0.9)),
        traffic=_traffic(snapshot, *span, between),
    )


def _last_change(snapshot: Snapshot) -> float:
    """When an option was changed last; one that could not be leaves all as it was."""
    return max((e.time for e in snapshot.events if e.kind == "option" and "not changed" not in e.text), default=-np.inf)


def _peers_at(times: np.ndarray, peers: Series) -> np.ndarray:
    """How many peers were there both before and after each of these moments."""
    after = np.searchsorted(peers.times, times)
    before = np.maximum(after - 1, 0)
    after = np.minimum(after, len(peers) - 1)
    return np.minimum(peers.lows[before], peers.lows[after])


def _failures_at(times: np.ndarray, snapshot: Snapshot) -> np.ndarray:
    """How many rounds were marked as failed at, or soon after, each of these moments."""
    marks = [event.time for event in snapshot.events if event.kind == "round" and "failed" in event.text]
    places = np.searchsorted(times, marks, side="right") - 1
    return np.bincount(places[places >= 0], minlength=len(times))


def _share_below(limits: np.ndarray, series: Series, chosen: np.ndarray) -> np.ndarray:
    """How many of the values that each point stands for are below a limit; exact if they are of two sizes at most."""
    means, lows, highs = series.values[chosen], series.lows[chosen], series.highs[chosen]
    between = (highs - means) / np.where(highs > lows, highs - lows, 1.0)
    return np.where(lows >= limits, 0.0, np.where(highs < limits, 1.0, between))


@dataclass(frozen=True)
class Traffic:
    """What one round sends or receives, whichever takes longer.

    :param bytes: on average
    :param rate: bytes per second, the highest that was seen: what the network is able to
    :param interval: seconds between two measurements
    """

    bytes: float
    rate: float
    interval: float

    @property
    def seconds(self) -> float:
        """How long it takes at the highest rate, hence at least."""
        return self.bytes / self.rate


def _traffic(snapshot: Snapshot, start: float, end: float, rounds: int) -> Traffic | None:
    found = []
    for name in ("bytes_sent", "bytes_received"):
        series = snapshot.series.get(name)
        if series is None:
            return None
        inside = (series.times >= start) & (series.times <= end)
        seconds, growth = np.diff(series.times[inside]), np.diff(series.highs[inside])
        known = (seconds > 0) & (growth >= 0)  # both totals and clocks can begin anew
        seconds, growth = seconds[known], growth[known]
        if len(growth) == 0 or growth.max() <= 0:
            return None
        found.append(Traffic(float(growth.sum()) / rounds, float((growth / seconds).max()), float(np.median(seconds))))
    return max(found, key=lambda traffic: traffic.seconds)
