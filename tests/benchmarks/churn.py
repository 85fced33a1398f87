"""What the others lose when a peer joins, is killed, or leaves; ``rounds.py --churn`` runs it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench_peer import Work
from swarm_bench import (
    Peer,
    figures,
    leave_all,
    lost,
    rate_alone,
    say,
    settled_epoch,
    starting,
    table,
    write_json,
)

#: Epochs in which it is measured what is lost anyway, and those in which all that an event costs comes to light.
BEFORE, AFTER = 4, 6
#: Seconds after which a newcomer is not waited for any longer.
PATIENCE = 60.0


@dataclass(frozen=True)
class Row:
    """One event; seconds are those of the peer among the others that has lost most.

    :param usual: lost in each epoch before
    :param seconds: lost besides in the epochs after the event
    :param longest: stall in those epochs
    :param failed: rounds of all the others in those epochs
    :param taking_part: which of its own epochs was the newcomer's first with all peers
    """

    event: str
    peers: int
    usual: float
    seconds: float
    longest: float
    failed: int
    taking_part: str


@dataclass(frozen=True)
class Event:
    """What a third peer does.

    :param happen: to it, which trains with the others from the start; without it, it joins
    :param strategy: further arguments of its strategy
    """

    happen: Callable[[Peer], None] | None
    strategy: dict[str, Any] = field(default_factory=dict)


def measure(name: str, event: Event, epoch: float, step: float, alone: float) -> Row:
    """Two peers and what a third does to them.

    :param alone: samples per second of one without hivemind
    """
    happen = event.happen
    work = Work(target=2 * round(epoch / step) * Work.batch, step=step)
    with starting() as start:
        count = 2 if happen is None else 3
        others = [start(work, count=count)]
        others += [start(work, others, count=count)]
        third = None if happen is None else start(replace(work, strategy=event.strategy), others, count=count)
        present = [*others, third] if third else others
        first = settled_epoch(present)
        for peer in present:
            peer.wait_for_epoch(first + BEFORE)
        began = others[0].epochs[-1].epoch
        usual = max(lost(peer, first, first + BEFORE, 1 / alone) for peer in others) / BEFORE
        taking_part = ""
        if happen is None or third is None:
            third = start(work, others)
            taking_part = _wait_until_it_takes_part(third)
            last = max(others[0].epochs[-1].epoch, third.epochs[-1].epoch if third.epochs else 0) + AFTER
        else:
            time.sleep(epoch / 3)  # in the middle of an epoch
            happen(third)
            last = began + AFTER
        for peer in others:
            peer.wait_for_epoch(last)
        found = figures(others, began, last)
        whole = max(lost(peer, began, last, 1 / alone) for peer in others)
        leave_all([*others, third] if happen is None else others)
    return Row(name, count, usual, whole - usual * (last - began), found.longest, found.failed, taking_part)


def _wait_until_it_takes_part(newcomer: Peer) -> str:
    newcomer.wait_for("began")
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        for number, one in enumerate(list(newcomer.epochs), start=1):
            if one.group_size == 3:
                return str(number)
        time.sleep(0.1)
    return f"none within {PATIENCE:.0f} s, {len(newcomer.epochs)} epochs"


EVENTS = {
    "joins": Event(None),
    "is killed, all processes": Event(lambda peer: peer.kill()),
    "is killed, main process": Event(lambda peer: peer.kill(whole_tree=False)),
    "in client mode is killed": Event(lambda peer: peer.kill(), {"client_mode": True}),
    "is cut off from the network": Event(lambda peer: peer.fall_silent()),
    "leaves": Event(lambda peer: peer.leave()),
}


def print_rows(rows: Sequence[Row]) -> None:
    heads = ["a third peer", "lost, s", "longest stall, s", "failed", "usual loss, s/epoch", "takes part in its epoch"]
    cells = [
        [
            row.event,
            f"{row.seconds:.2f}",
            f"{row.longest:.2f}",
            row.failed,
            f"{row.usual:.2f}",
            row.taking_part,
        ]
        for row in rows
    ]
    print(table(heads, cells))


def main(epoch: float, step: float, json: Path | None, quick: bool) -> int:
    alone = rate_alone(Work(target=1, step=step))
    rows = []
    for name, event in list(EVENTS.items())[: 1 if quick else None]:
        say(f"a third peer {name} ...")
        rows.append(measure(name, event, epoch, step, alone))
    print_rows(rows)
    write_json(json, rows, alone=alone)
    return 0
