"""What two peers lose while the line of a third is cut, and how it comes back; rows of ``internet.py``."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench_peer import Work
from overlap import DELAYS
from places import Line, places
from swarm_bench import Peer, Target, figures, leave_all, lost, settled_epoch, starting, table

COUNT = 3
#: Seconds of computing in an epoch of all three, and what each of them does.
EPOCH = 2.4
WORK = Work(target=round(COUNT * EPOCH / Work.step) * Work.batch, parameters=10_000, strategy=DELAYS)
#: Epochs in which it is measured what is lost anyway, and those after the return.
BEFORE, AFTER = 4, 4
#: Seconds after which a peer that was away is not waited for any longer.
PATIENCE = 90.0


@dataclass(frozen=True)
class Absence:
    """What happens to a swarm.

    :param seconds: for which a line is cut
    :param line: of each host
    """

    seconds: float
    line: Line


@dataclass(frozen=True)
class Row:
    """One absence. Seconds lost are those in which a peer put nothing into the swarm, less what it loses anyway.

    :param seconds: for which the peer was away
    :param usual: seconds lost in each epoch before, by the peer among the others that lost most
    :param lost: by each of the others, from the cut until some epochs after the return
    :param longest: time of the others in step in an epoch
    :param failed: rounds of the others
    :param back_after: seconds from when its line is whole until a round of all three begins; ``None`` if none did
    :param epochs_alone: that the peer has ended meanwhile
    :param epochs: of the others, from the cut on, of which the usual loss is taken off
    """

    who: str
    seconds: float
    usual: float
    lost: list[float]
    longest: float
    failed: int
    back_after: float | None
    epochs_alone: int
    epochs: int


def measure(who: str, target: Target, absence: Absence, alone: float) -> Row:
    """Three peers; the last one's line is cut and made whole again.

    :param alone: samples per second of one without hivemind
    """
    with places([absence.line] * COUNT) as (internet, found), starting() as start:
        peers: list[Peer] = []
        for place in found:
            peers.append(start(WORK.at(place), peers, target, COUNT))
        *others, third = peers
        first = settled_epoch(peers)
        for peer in peers:
            peer.wait_for_epoch(first + BEFORE)
        began = others[0].epochs[-1].epoch
        usual = max(lost(peer, first, began, 1 / alone) for peer in others) / (began - first)
        time.sleep(EPOCH / 3)  # in the middle of an epoch
        ended = len(third.epochs)
        internet.change(COUNT - 1, is_cut=True)
        time.sleep(absence.seconds)
        internet.change(COUNT - 1, is_cut=False)
        whole_again, epochs_alone = time.monotonic(), len(third.epochs) - ended
        back_at = _wait_for_a_round_of_all(third, whole_again)
        last = others[0].epochs[-1].epoch + AFTER
        for peer in others:
            peer.wait_for_epoch(last)
        seconds = [lost(peer, began, last, 1 / alone) - usual * (last - began) for peer in others]
        came_to = figures(others, began, last)
        leave_all(peers)
    back_after = None if back_at is None else back_at - whole_again
    outcome = came_to.longest, came_to.failed, back_after, epochs_alone, last - began
    return Row(who, absence.seconds, usual, seconds, *outcome)


def _wait_for_a_round_of_all(peer: Peer, since: float) -> float | None:
    """When the first round of all began after a moment: with the epoch before that whose end tells of it."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        epochs = list(peer.epochs)
        for before, one in itertools.pairwise(epochs):
            if before.at >= since and one.group_size == COUNT:
                return before.at
        time.sleep(0.1)
    return None


def print_rows(rows: Sequence[Row]) -> None:
    heads = ["one of three is away", "", "the others lost, s", "longest, s", "failed", "usual loss, s/epoch"]
    cells = [
        [
            f"{row.seconds:.0f} s",
            row.who,
            " and ".join(f"{seconds:.2f}" for seconds in row.lost),
            f"{row.longest:.2f}",
            row.failed,
            f"{row.usual:.2f}",
            f"not within {PATIENCE:.0f} s" if row.back_after is None else f"{row.back_after:.1f} s",
            row.epochs_alone,
            row.epochs,
        ]
        for row in rows
    ]
    print(table([*heads, "in a round with them again after", "epochs alone", "epochs"], cells))
