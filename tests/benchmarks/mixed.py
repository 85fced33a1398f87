"""Measures in how many epochs two peers meet: one of each kind, beside two of plain hivemind, in turns.

All have the same arguments, and epochs of less than half a second of computing, which hardly leave time to meet.

    python tests/benchmarks/mixed.py --runs 5 --json mixed.json
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import bench_peer
from bench_peer import Work
from swarm_bench import Target, leave_all, machine, parser, say, settled_epoch, starting, table, write_json

#: Batches of both together in an epoch.
BATCHES = 16

PAIRS: dict[str, tuple[Target, Target]] = {
    "hivenb and plain": (bench_peer.with_strategy, bench_peer.with_plain_hivemind),
    "plain and hivenb": (bench_peer.with_plain_hivemind, bench_peer.with_strategy),
    "two plain": (bench_peer.with_plain_hivemind, bench_peer.with_plain_hivemind),
}


@dataclass(frozen=True)
class Meetings:
    """Of one pair.

    :param who: which kinds of peers, the first one first
    :param met: epochs in which the gradients of both were averaged
    :param of: epochs that were looked at
    :param seconds: of them all
    """

    who: str
    met: int
    of: int
    seconds: float


def measure(who: str, epochs: int, work: Work) -> Meetings:
    """A pair, from its start on.

    :param epochs: to be looked at, after the start
    """
    with starting() as start:
        first_kind, second_kind = PAIRS[who]
        first = start(work, target=first_kind)
        peers = [first, start(work, [first], target=second_kind)]
        since = settled_epoch(peers)
        last = since + epochs
        for peer in peers:
            peer.wait_for_epoch(last)
        looked_at = range(since + 1, last + 1)
        sizes = [{one.epoch: one.group_size for one in peer.epochs} for peer in peers]
        met = sum(all(of_peer.get(epoch) == 2 for of_peer in sizes) for epoch in looked_at)
        at = {one.epoch: one.at for one in first.epochs}
        seconds = max(at.values()) - min(when for epoch, when in at.items() if epoch >= since)
        leave_all(peers)
    return Meetings(who, met, epochs, seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--runs", type=int, default=5, help="of each pair")
    options.add_argument("--epochs", type=int, default=10, help="that count, after the start")
    given = options.parse_args(arguments)
    if given.quick:
        given.runs, given.epochs = 1, 3
    print(machine())
    work = Work(target=BATCHES * Work.batch)
    rows: list[Meetings] = []
    for run in range(given.runs):
        for who in PAIRS:
            say(f"{who}, run {run + 1} ...")
            rows.append(measure(who, given.epochs, work))
    of = {who: [row for row in rows if row.who == who] for who in PAIRS}
    heads = ["", f"met, of {given.epochs} epochs", "mean"]
    mean = {who: sum(row.met for row in found) / len(found) for who, found in of.items()}
    print(table(heads, [[who, ", ".join(str(row.met) for row in of[who]), f"{mean[who]:.1f}"] for who in PAIRS]))
    if mean["two plain"]:
        print(f"mixed to plain: {mean['hivenb and plain'] / mean['two plain']:.2f}")
    write_json(given.json, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
