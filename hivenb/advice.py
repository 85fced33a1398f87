"""What the figures of a run suggest to change: the documentation's guidance as rules.

A rule looks at the newest rounds since an option was changed last, and is silent until it has seen enough of them;
so an advice goes once its cause is gone, or once it was followed. Importing this module imports neither torch nor
hivemind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hivenb.errors import OptionsError
from hivenb.history import Series, Snapshot
from hivenb.options import FIELDS, Options

#: Rounds that a rule needs to say anything, and those that it looks at: the newest ones.
LEAST_ROUNDS, MOST_ROUNDS = 8, 40

#: hivemind's documentation of ``matchmaking_time`` (hivemind.Optimizer, and Lightning's HivemindStrategy which refers
#: to it): raise it if groups are smaller than this share of the peers ...
FULL_GROUP = 0.9

#: ... in at least this share of the rounds, and ``averaging_timeout`` if as many end with local gradients.
OFTEN = 0.25

#: hivemind's documentation warns of an ``averaging_timeout`` that is too high. Where these times do not help, longer
#: ones will not either: the peers do not reach each other.
LONGEST_MATCHMAKING, LONGEST_AVERAGING = 60.0, 300.0

#: Ours: shares of the time that training stands still from which it is worth a change of what needs one anyway, from
#: which it is worth one in any case, and from which the rounds take longer than the batches between them, so that
#: they would be waited for in the background as well.
NOTICEABLE, MUCH, TOO_MUCH_TO_HIDE = 0.1, 0.3, 0.5

#: Ours, after hivemind's documentation that small batches need a short ``matchmaking_time``: epochs are much shorter
#: than it if they take less than this share of it.
SHORT_EPOCH = 0.25

#: The target batch size is never multiplied by more at once: learning changes with it.
LARGEST_FACTOR = 8

#: The options that make up overlap.
OVERLAP = ("delay_state_averaging", "delay_optimizer_step", "delay_grad_averaging")


@dataclass(frozen=True)
class Advice:
    """What to change, and why.

    :param rule: the name of the rule
    :param text: a sentence for people, with the figures that triggered the rule
    :param figures: the same figures for code, by name; shares from 0 to 1, times in seconds
    :param changes: what to hand to ``run.apply(**changes)``, with all that these options need
    """

    rule: str
    text: str
    figures: Mapping[str, float]
    changes: Mapping[str, Any]


def advise(snapshot: Snapshot, options: Options) -> tuple[Advice, ...]:
    """What the newest figures suggest to change, most important first; empty if all is well or too little is known.

    :param snapshot: of the run's history
    :param options: in force
    """
    # A helper waits for others all the time, and that is what it is for.
    rounds = None if options.auxiliary else _newest_rounds(snapshot)
    if rounds is None:
        return ()
    found: list[Advice | None] = []
    # Local updates average no gradients, and in the background a round ends after its epoch was recorded.
    groups_are_known = not (options.use_local_updates or options.delay_grad_averaging)
    if groups_are_known:
        found += [_too_few_peers(rounds, options), _failed_rounds(rounds, options)]
    if not (groups_are_known and rounds.failed >= OFTEN):  # else it is the failed ones that were waited for
        found.append(_standing_still(rounds, options))
    return tuple(advice for advice in found if advice is not None)


# -- what is looked at ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rounds:
    """The newest rounds in which this peer was not alone. Shares are of all of them."""

    count: int
    peers: float  # on average
    group_size: float  # on average
    incomplete: float  # share with too few peers, without those that failed
    failed: float  # share
    stalled: float  # seconds in each, on average
    computing: float  # seconds between two, as usual: a pause in between does not count
    epoch: float  # seconds, of the longer ones

    @property
    def stalled_share(self) -> float:
        """Share of the time that training stood still."""
        return self.stalled / max(self.stalled + self.computing, 1e-9)


def _newest_rounds(snapshot: Snapshot) -> _Rounds | None:
    sizes, stalls, peers = (snapshot.series.get(name) for name in ("group_size", "stalled_seconds", "peers"))
    if sizes is None or stalls is None or peers is None or abs(len(sizes) - len(stalls)) > 1:
        return None
    known = min(len(sizes), len(stalls))  # one may have been recorded already, and the other not yet
    if known < LEAST_ROUNDS:
        return None
    times = sizes.times[:known]
    # In a very long run a point stands for several neighbouring rounds, and all for as many but for the last.
    stride = max(1, int(np.median(np.diff(sizes.epochs[:known]))))
    weights = np.clip(np.diff(sizes.epochs[:known], prepend=sizes.epochs[0] - stride), 1, stride)
    seconds = np.diff(times, prepend=np.nan) / weights

    present = _peers_at(times, peers)
    newest = max(LEAST_ROUNDS, int(np.sum(np.cumsum(weights[::-1]) <= MOST_ROUNDS)))
    changed = max((event.time for event in snapshot.events if event.kind == "option"), default=-np.inf)
    chosen = np.flatnonzero((np.arange(known) >= known - newest) & (times > changed) & (present >= 2))
    if len(chosen) < LEAST_ROUNDS:
        return None

    weights, seconds, present = weights[chosen], seconds[chosen], present[chosen]
    failed = _failures_at(times, snapshot)[chosen] / weights
    incomplete = _share_below(FULL_GROUP * present - 1e-9, sizes, chosen)
    stalled = stalls.values[chosen]
    return _Rounds(
        count=int(weights.sum()),
        peers=float(np.average(present, weights=weights)),
        group_size=float(np.average(sizes.values[chosen], weights=weights)),
        # a round that failed counts as a group of one
        incomplete=float(np.average(np.maximum(incomplete - failed, 0.0), weights=weights)),
        failed=float(np.average(np.minimum(failed, 1.0), weights=weights)),
        stalled=float(np.average(stalled, weights=weights)),
        computing=float(np.nanmedian(np.maximum(seconds - stalled, 0.0))),
        epoch=float(np.nanquantile(seconds, 0.9)),
    )


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


# -- the rules --------------------------------------------------------------------------------------------------


def _too_few_peers(rounds: _Rounds, options: Options) -> Advice | None:
    now, longer = options.matchmaking_time, min(2 * options.matchmaking_time, LONGEST_MATCHMAKING)
    if rounds.incomplete < OFTEN or longer <= now:
        return None
    changes = {"matchmaking_time": longer}
    if options.averaging_timeout <= longer:
        changes["averaging_timeout"] = 3 * longer
    return _advice(
        "too few peers",
        f"In {_percent(rounds.incomplete)} of the last {rounds.count} rounds fewer than {FULL_GROUP:g} of the peers "
        f"averaged together, {rounds.group_size:.1f} of {rounds.peers:.1f} on average: let a round wait for them for "
        f"{longer:g} s instead of {now:g} s.",
        {
            "share": rounds.incomplete,
            "rounds": rounds.count,
            "group_size": rounds.group_size,
            "peers": rounds.peers,
        },
        options,
        changes,
    )


def _failed_rounds(rounds: _Rounds, options: Options) -> Advice | None:
    now, longer = options.averaging_timeout, min(2 * options.averaging_timeout, LONGEST_AVERAGING)
    if rounds.failed < OFTEN or longer <= now:
        return None
    return _advice(
        "failed rounds",
        f"{_percent(rounds.failed)} of the last {rounds.count} rounds failed, and this peer went on with its local "
        f"gradients: give a round {longer:g} s instead of {now:g} s.",
        {"share": rounds.failed, "rounds": rounds.count},
        options,
        {"averaging_timeout": longer},
    )


def _standing_still(rounds: _Rounds, options: Options) -> Advice | None:
    """One advice at most on what to do about the time that training stands still."""
    share = rounds.stalled_share
    if share < NOTICEABLE:
        return None
    figures = {
        "share": share,
        "rounds": rounds.count,
        "stalled_seconds": rounds.stalled,
        "computing_seconds": rounds.computing,
    }
    seen = (
        f"Training stood still for {_percent(share)} of the time of the last {rounds.count} rounds, "
        f"{_seconds(rounds.stalled)} for each"
    )
    if options.offload_optimizer and not options.delay_optimizer_step:
        wanted = {"delay_optimizer_step": True}
        text = f"{seen}, and the optimizer is in main memory, but does not overlap: let its step run in background."
        advice = _advice("offload without overlap", text, figures, options, wanted)
        if advice is not None:
            return advice
    if share >= MUCH:
        hidden = _hidden(rounds, options, seen, figures)
        if hidden is not None:
            return hidden
        if any(getattr(options, name) for name in OVERLAP):
            seen += " although they overlap"
        enough = rounds.stalled * (1 / MUCH - 1) / max(rounds.computing, 1e-9)
        return _rarer("rounds too often", options, seen, figures, enough)
    if rounds.epoch < SHORT_EPOCH * options.matchmaking_time:
        enough = SHORT_EPOCH * options.matchmaking_time / max(rounds.epoch, 1e-9)
        seen += (
            f", as epochs of {_seconds(rounds.epoch)} are much shorter than the matchmaking time of "
            f"{options.matchmaking_time:g} s"
        )
        figures |= {"epoch_seconds": rounds.epoch}
        return _rarer("short epochs", options, seen, figures, enough)
    return None


def _hidden(rounds: _Rounds, options: Options, seen: str, figures: Mapping[str, float]) -> Advice | None:
    """Overlap, where the rounds fit between each other."""
    wanted = "delay_state_averaging" if options.use_local_updates else "delay_grad_averaging"
    if rounds.stalled_share >= TOO_MUCH_TO_HIDE or getattr(options, wanted):
        return None
    text = (
        f"{seen}, which is less than the {_seconds(rounds.computing)} of training between them: let averaging run in "
        "background."
    )
    return _advice("no overlap", text, figures, options, {wanted: True})


def _rarer(rule: str, options: Options, seen: str, figures: Mapping[str, float], enough: float) -> Advice | None:
    """A larger target batch size, by the least power of two that is more than ``enough``."""
    now, factor = options.target_batch_size, 2
    while factor <= enough and factor < LARGEST_FACTOR:
        factor *= 2
    text = f"{seen}: gather {factor * now:,} samples for an update instead of {now:,}."
    return _advice(rule, text, figures, options, {"target_batch_size": factor * now})


def _advice(
    rule: str, text: str, figures: Mapping[str, float], options: Options, wanted: Mapping[str, Any]
) -> Advice | None:
    """An advice with all that its changes need, or None if these options do not admit them."""
    try:
        difference = options.difference(options.with_prerequisites(**wanted))
    except OptionsError:
        return None
    return Advice(rule, text, dict(figures), {name: value for name, (_, value) in difference.items()})


# -- in words ---------------------------------------------------------------------------------------------------


def in_words(changes: Mapping[str, Any]) -> str:
    """Changes of options by their labels: ``matchmaking time: 10 seconds, averaging timeout: 60 seconds``."""
    return ", ".join(_in_words(changes))


def _in_words(changes: Mapping[str, Any]) -> Iterator[str]:
    for name in FIELDS:  # the order in which people know them
        if name in changes:
            value, unit = changes[name], FIELDS[name].unit
            if isinstance(value, bool):
                shown = "on" if value else "off"
            else:
                shown = f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else value
            yield f"{FIELDS[name].label}: {shown}{f' {unit}' if unit else ''}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
