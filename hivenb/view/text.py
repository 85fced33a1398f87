"""A run as text: for terminals, for notebooks without widgets, and for all who like to copy and paste."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hivenb.engine.network.addresses import Reach
from hivenb.figures.advice import Advice
from hivenb.figures.history import Snapshot
from hivenb.figures.metric_names import Better, better, is_of_validation
from hivenb.run.status import who_trains_elsewhere
from hivenb.swarm.peer_id import short_id
from hivenb.system.safe_text import printable
from hivenb.view import formats
from hivenb.view.empty_states import ANY_TIME, Situation, no_peers_listed

if TYPE_CHECKING:
    from hivenb.run.status import RunStatus
    from hivenb.swarm.members import Member

#: How one is connected, if that is not how most are.
_WORTH_A_WORD = (Reach.RELAYED, Reach.NOT)

#: Seconds that an epoch has to take for a time that is left to be worth reading.
_LEAST_EPOCH = 3.0


def bar(share: float, width: int = 20) -> str:
    """A progress bar of ``width`` characters and two brackets.

    :param share: how much is done, from 0 to 1; what is beyond is cut
    """
    filled = int(min(max(share, 0.0), 1.0) * width + 0.5)
    return f"[{'#' * filled}{'-' * (width - filled)}]"


def progress(status: RunStatus) -> str:
    """Samples towards the next epoch, and the time that is left: ``1,310 / 2,048 samples, 3 s left``.

    Without the time where epochs are so short that it would only flicker.
    """
    text = f"{formats.count(status.samples)} / {formats.count(status.target_batch_size)} samples"
    speed = status.swarm_samples_per_second or status.samples_per_second
    if status.eta_seconds is not None and status.target_batch_size >= _LEAST_EPOCH * speed:
        text += f", {formats.left(status.eta_seconds)}"
    return text


def status_line(status: RunStatus, bar_width: int = 20) -> str:
    """A run in one line.

    :param status: of the run
    :param bar_width: characters of the progress bar
    """
    speed = status.swarm_samples_per_second or status.samples_per_second
    share = status.samples / status.target_batch_size if status.target_batch_size else 0.0
    parts = [
        formats.state(status.state),
        f"swarm epoch {formats.count(status.epoch)}",
        f"{bar(share, bar_width)} {progress(status)}",
        *([formats.counted(status.num_peers, "peer")] if status.num_peers else []),
        formats.rate(speed),
    ]
    if status.loss is not None:
        parts.append(f"loss {formats.value(status.loss)}")
    return "  ".join(parts)


def summary(
    status: RunStatus,
    snapshot: Snapshot,
    members: Sequence[Member] = (),
    advice: Sequence[Advice] = (),
    now: Situation | None = None,
    run_id: str = "",
) -> str:
    """A run in a few lines: its state, its figures from first to last, its peers.

    :param status: of the run
    :param snapshot: of its history
    :param members: its peers
    :param advice: what its figures suggest to change
    :param now: what decides what is said while there are no peers; by default the state of the run alone
    :param run_id: its name
    :returns: lines joined by newlines, none at the end; equal input gives equal text
    """
    lines = [status_line(status)]
    if status.origin or status.elsewhere:
        where = who_trains_elsewhere(status.elsewhere, run_id) if status.elsewhere else ""
        lines += [printable("; ".join(one for one in (f"run {run_id}: {status.origin}", where) if one))]
    if status.skipped_batches:
        lines += [f"{formats.counted(status.skipped_batches, 'batch')} skipped, as their gradients were not finite"]
    if status.error:
        lines += [f"failed: {printable(status.error)}"]
    figures = figure_lines(snapshot)
    if figures:
        lines += ["", *figures]
    now = Situation(str(status.state.value)) if now is None else now
    lines += ["", *peer_lines(members, now)]
    if advice:
        lines += ["", advice_line(advice)]
    return "\n".join(lines)


def figure_lines(snapshot: Snapshot) -> list[str]:
    """Losses and validation metrics, from first to last, as the lines of a table; none before the first figure."""
    rows = [
        (
            formats.title(name),
            formats.metric(name, first),
            formats.metric(name, last),
            _best(name, snapshot),
        )
        for name, first, last in _figures(snapshot)
    ]
    return table(("", "first", "last", "best"), rows, numbers_from=1) if rows else []


def peer_lines(members: Sequence[Member], now: Situation = ANY_TIME) -> list[str]:
    """Peers as the lines of a table, or one line that says how to get some.

    :param now: what decides what is said while there are none
    """
    if not members:
        return [no_peers_listed(now)]
    rows = [
        (
            who(member),
            formats.count(member.peer.epoch),
            formats.rate(member.peer.samples_per_second),
            formats.count(member.samples),
            formats.share(member.share),
            formats.presence(member),
        )
        for member in members
    ]
    return table(("peer", "epoch", "speed", "samples", "share", "last seen"), rows, numbers_from=1)


def who(member: Member) -> str:
    """A peer by its name, if it has one, and the end of its id, and what is special about it."""
    kinds = ["this one"] * member.peer.is_self + [member.route.value] * (member.route in _WORTH_A_WORD)
    return f"{member.name} {short_id(member.peer.peer_id)}".strip() + (f" ({', '.join(kinds)})" if kinds else "")


def advice_line(advice: Sequence[Advice]) -> str:
    """The first of at least one advice in one line, and how many more there are."""
    more = f" ({len(advice) - 1} more)" if len(advice) > 1 else ""
    return f"advice: {advice[0].text}{more}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers_from: int) -> list[str]:
    """Rows of text under a head, in columns as wide as they need to be.

    :param head: a title for each column
    :param rows: as many texts each
    :param numbers_from: the first column that is aligned to the right
    """
    whole = [tuple(head), *(tuple(row) for row in rows)]
    widths = [max(len(row[i]) for row in whole) for i in range(len(head))]
    lines = []
    for row in whole:
        cells = [
            text.ljust(width) if i < numbers_from else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _figures(snapshot: Snapshot) -> list[tuple[str, float, float]]:
    names = [name for name in snapshot.series if name == "loss" or is_of_validation(name)]
    found = []
    for name in sorted(names):
        last = snapshot.last(name)
        if last is not None:
            found.append((name, float(snapshot.series[name].values[0]), last))
    return found


def _best(name: str, snapshot: Snapshot) -> str:
    series, direction = snapshot.series[name], better(name)
    if direction is None:
        return formats.ABSENT
    # without the gaps
    best = np.fmax.reduce(series.highs) if direction is Better.HIGHER else np.fmin.reduce(series.lows)
    return formats.metric(name, float(best))
