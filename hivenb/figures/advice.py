"""What the figures of a run suggest to change: the documentation's guidance as rules.

A rule looks at the newest rounds since an option was changed last, and is silent until it has seen enough of them;
so an advice goes once its cause is gone, or once it was followed. One looks back: at changes since which the loss has
risen. Importing this module imports neither torch nor
hivemind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hivenb.errors import NotFiniteError, OptionsError
from hivenb.figures.history import Event, Snapshot
from hivenb.figures.loss_rises import LossRise, loss_rises
from hivenb.figures.recent_rounds import FULL_GROUP, Rounds, newest_rounds
from hivenb.options.options import FIELDS, Options

#: hivemind's documentation of its Optimizer, to which that of Lightning's HivemindStrategy refers: raise
#: ``matchmaking_time`` if groups are not full in at least this share of the rounds, and ``averaging_timeout`` if as
#: many end with local gradients.
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

#: Ours: compression is worth its loss of precision if so much of the time that training stands still is spent sending.
MOSTLY_TRAFFIC = 0.5

#: Ours: bytes in a round below which it is not its size that takes time; and how many measurements long they have to
#: flow, because a rate is too low if it was measured over an interval that holds silence as well.
LEAST_TRAFFIC, STEADY = 1e6, 4

#: Ours: batches in a row that are left out from which on something is wrong, and the seconds for which that is said.
SEVERAL_IN_A_ROW, SAID_FOR = 3, 60.0

#: By how much an advice multiplies the target batch size, so that what learning makes of it can be seen before the next
#: one: the rate that suits it changes, too. Of gradient descent with momentum, it grows as the batch does
#: (https://arxiv.org/abs/1706.02677), of Adam as the square root of it (https://arxiv.org/abs/2205.10782).
FACTOR = 2

#: The options that make up overlap.
OVERLAP = ("delay_state_averaging", "delay_optimizer_step", "delay_grad_averaging")


@dataclass(frozen=True)
class Advice:
    """What to change, and why.

    :param rule: the name of the rule
    :param text: a sentence for people, with the figures that triggered the rule
    :param figures: the same figures for code, by name; shares from 0 to 1, times in seconds
    :param changes: what to hand to ``run.apply(**changes)``, with all that these options need; empty where no option
      helps
    :param event: the mark on the charts that it takes back; ``None`` for advice on what comes
    """

    rule: str
    text: str
    figures: Mapping[str, float]
    changes: Mapping[str, Any]
    event: Event | None = None


def advise(snapshot: Snapshot, options: Options) -> tuple[Advice, ...]:
    """What the newest figures suggest to change, most important first; empty if all is well or too little is known.

    :param snapshot: of the run's history
    :param options: in force
    """
    found: list[Advice | None] = [_batches_skipped(snapshot)]
    found += [_loss_has_risen(rise, options) for rise in loss_rises(snapshot, options)]
    # A helper waits for others all the time, and that is what it is for.
    rounds = None if options.auxiliary else newest_rounds(snapshot)
    if rounds is not None:
        found += _on_rounds(rounds, options)
    return tuple(advice for advice in found if advice is not None)


def _on_rounds(rounds: Rounds, options: Options) -> list[Advice | None]:
    found: list[Advice | None] = []
    averages_gradients = not options.use_local_updates
    if averages_gradients:
        found += [_too_few_peers(rounds, options), _failed_rounds(rounds, options)]
    if not (averages_gradients and rounds.failed >= OFTEN):  # else it is the failed ones that were waited for
        found += [_standing_still(rounds, options), _much_traffic(rounds, options)]
    return found


# -- the rules --------------------------------------------------------------------------------------------------


def _batches_skipped(snapshot: Snapshot) -> Advice | None:
    series = snapshot.series.get("skipped_in_a_row")
    if series is None:
        return None
    now = max(float(one.times[-1]) for one in snapshot.series.values())
    most = int(series.highs[series.times >= now - SAID_FOR].max(initial=0))
    if most < SEVERAL_IN_A_ROW:
        return None
    total = int(snapshot.last("skipped_batches") or most)
    text = (
        f"The gradients of {most} batches in a row were not finite; {total} were skipped so far, and if it goes on "
        f"the run ends. {NotFiniteError.REMEDY}."
    )
    return Advice("batches skipped", text, {"in_a_row": most, "skipped": total}, {})


def _loss_has_risen(rise: LossRise, options: Options) -> Advice | None:
    text = f"{rise.text[0].upper()}{rise.text[1:]}: take it back."
    figures = {"before": rise.before, "after": rise.after, "epochs": rise.epochs}
    try:
        difference = options.difference(options.with_prerequisites(**rise.changes))
    except OptionsError:
        return None
    changes = {name: value for name, (_, value) in difference.items()}
    return Advice(f"loss has risen: {', '.join(rise.changes)}", text, figures, changes, rise.event)


def _too_few_peers(rounds: Rounds, options: Options) -> Advice | None:
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


def _failed_rounds(rounds: Rounds, options: Options) -> Advice | None:
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


def _standing_still(rounds: Rounds, options: Options) -> Advice | None:
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
        return _rarer("rounds too often", options, seen, figures)
    if rounds.epoch < SHORT_EPOCH * options.matchmaking_time:
        seen += (
            f", as swarm epochs of {_seconds(rounds.epoch)} are much shorter than the matchmaking time of "
            f"{options.matchmaking_time:g} s"
        )
        figures |= {"epoch_seconds": rounds.epoch}
        return _rarer("short epochs", options, seen, figures)
    return None


def _much_traffic(rounds: Rounds, options: Options) -> Advice | None:
    """Compression, where training stands still for the network's sake and not for that of finding each other."""
    traffic = rounds.traffic
    if traffic is None or traffic.bytes < LEAST_TRAFFIC or rounds.stalled_share < NOTICEABLE:
        return None
    if traffic.seconds < STEADY * traffic.interval:
        return None
    is_compressed = options.grad_compression != "none" or options.grad_averager_factory is not None
    if is_compressed or options.use_local_updates or traffic.seconds < MOSTLY_TRAFFIC * rounds.stalled:
        return None
    return _advice(
        "much traffic",
        f"In each of the last {rounds.count} rounds training stood still for {_seconds(rounds.stalled)}, of which the "
        f"network took {_seconds(traffic.seconds)} for {traffic.bytes / 1e6:,.1f} MB at "
        f"{traffic.rate / 1e6:,.1f} MB/s: send gradients in half as many bytes, rounded to three digits.",
        {
            "share": traffic.seconds / rounds.stalled,
            "rounds": rounds.count,
            "stalled_seconds": rounds.stalled,
            "bytes": traffic.bytes,
            "bytes_per_second": traffic.rate,
        },
        options,
        {"grad_compression": "float16"},
    )


def _hidden(rounds: Rounds, options: Options, seen: str, figures: Mapping[str, float]) -> Advice | None:
    """Overlap, where the rounds fit between each other: the rule of ``hivenb/OVERLAP.md``, and its figures.

    All of it, with what makes up for late gradients: step and parameters alone gained next to nothing over a slow line.
    """
    if rounds.stalled_share >= TOO_MUCH_TO_HIDE:
        return None
    seen = f"{seen}, which is less than the {_seconds(rounds.computing)} of training between them"
    if options.use_local_updates:
        if options.delay_state_averaging:
            return None
        text = f"{seen}: let averaging run in background."
        return _advice("no overlap", text, figures, options, {"delay_state_averaging": True})
    if options.delay_grad_averaging:
        return None
    text = (
        f"{seen}: let gradients and parameters be averaged in background. Meanwhile this peer goes on from a step with "
        "its own gradients, so that what it computes is hardly late."
    )
    return _advice("no overlap", text, figures, options, {"delay_grad_averaging": True})


def _rarer(rule: str, options: Options, seen: str, figures: Mapping[str, float]) -> Advice | None:
    """A larger target batch size, and what becomes of the learning rate."""
    now, later = options.target_batch_size, FACTOR * options.target_batch_size
    root = FACTOR**0.5
    text = (
        f"{seen}: gather {later:,} samples for an update instead of {now:,}. The learning rate stays as it is unless "
        f"you change it: for {FACTOR} times the samples, that of SGD is usually multiplied by {FACTOR}, that of Adam "
        f"by {root:.1f}."
    )
    figures = {**figures, "rate_factor_of_sgd": FACTOR, "rate_factor_of_adam": root}
    return _advice(rule, text, figures, options, {"target_batch_size": later})


def _advice(
    rule: str, text: str, figures: Mapping[str, float], options: Options, wanted: Mapping[str, Any]
) -> Advice | None:
    """An advice with all that its changes need, or None if these options do not admit them.

    Gradients in the background are offered only with what makes up for their delay.
    """
    if wanted.get("delay_grad_averaging"):
        wanted = {**wanted, "delay_compensation": True}
    try:
        difference = options.difference(options.with_prerequisites(**wanted))
    except OptionsError:
        return None
    return Advice(rule, text, dict(figures), {name: value for name, (_, value) in difference.items()})


# -- in words ---------------------------------------------------------------------------------------------------


def in_words(changes: Mapping[str, Any]) -> str:
    """Changes of options by their labels: ``matchmaking time 10 seconds; on: optimizer in main memory``."""
    values: list[str] = []
    on: list[str] = []
    off: list[str] = []
    for name in FIELDS:  # the order in which people know them
        if name in changes:
            label, unit, value = FIELDS[name].label, FIELDS[name].unit, changes[name]
            if isinstance(value, bool):
                (on if value else off).append(label)
            else:
                values.append(f"{label} {_in_words(name, value)}{f' {unit}' if unit else ''}")
    return "; ".join([*values, *(f"{word}: {', '.join(which)}" for word, which in (("on", on), ("off", off)) if which)])


def _in_words(name: str, value: object) -> str:
    if isinstance(value, (int, float)):
        return f"{value:,}" if isinstance(value, int) else f"{value:g}"
    return FIELDS[name].words(value)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
