"""Measures what it takes to keep a swarm together, by the number of its peers, and reckons it for a thousand.

Peers of one machine that train nothing: they report samples at a fixed pace, look at what the others report, ask who is
silent, and end epochs together, by hivenb's tracker and, in the same run, by plain hivemind's. With ``--rounds``, each
has an optimizer with a model of one number, which looks for groups, too. A call counts for
the peer that makes it, its answer included; bytes are those that its daemon sends, as the kernel has counted them.

    python tests/benchmarks/large_swarms.py --json large_swarms.json
    python tests/benchmarks/large_swarms.py --rounds --peers 2 4 8 16 --plain 2 4 8
    python tests/benchmarks/large_swarms.py --peers 64 --plain --lot 8 --epoch 20 --epochs 2
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np
from control_plane import BATCH, KINDS, Part, Passed, take_part
from swarm_bench import Peer, cpu_seconds, machine, parser, say, settled_epoch, starting, table, write_json

from hivenb.figures.measured_traffic import Traffic

#: Peers that are started at a time.
AT_A_TIME = 8

#: Cores that are busy from which on it is the machine that is measured.
BUSY = 0.85

#: Peers for whom the laws are reckoned.
MANY = 1000

#: Nodes that hold a record. Of no more peers, each holds them all: another law, which larger swarms do not follow.
REPLICAS = 5


@dataclass(frozen=True)
class Row:
    """A swarm, after its start.

    :param who: whose classes the peers use
    :param epoch: seconds of one, as it was
    :param asked: remote calls of a peer in an epoch, on average, by :data:`control_plane.KINDS`
    :param answered: by the busiest peer, in an epoch
    :param met: seconds from the last order to begin until each saw all others; ``None`` if one never did
    :param known: seconds from the first peer that ends an epoch to the last one, the median
    :param group_size: peers in a round, on average
    :param sent: bytes that a peer sends in an epoch, on average
    :param most_sent: by the busiest one
    :param cpu: seconds of CPU time of all processes, for each second and each core
    """

    who: str
    peers: int
    epoch: float
    asked: dict[str, float]
    answered: float
    met: float | None
    known: float
    group_size: float
    sent: float = 0.0
    most_sent: float = 0.0
    cpu: float = 0.0

    @property
    def messages(self) -> float:
        """Remote calls of a peer in an epoch."""
        return sum(self.asked.values())


@dataclass(frozen=True)
class Law:
    """``factor * n ** power``, by least squares of logarithms.

    :param off_by: the largest ratio of what was measured and what the law says, or the other way round
    :param for_many: what it says for :data:`MANY` peers
    """

    who: str
    what: str
    factor: float
    power: float
    off_by: float
    for_many: float


@dataclass(frozen=True)
class Course:
    """What all swarms do.

    :param epoch: seconds that all together need for one
    :param step: seconds of a batch
    :param epochs: that count
    :param averages: whether they look for groups
    :param lot: how many begin at a time, when all before them have met; ``None`` for all at once
    """

    epoch: float
    step: float
    epochs: int
    averages: bool
    lot: int | None


class Meter:
    """What all peers take, from when it is made.

    :param peers: which have said where their DHT is
    """

    def __init__(self, peers: Sequence[Peer]):
        self._peers, self._began, self._cpu = peers, time.monotonic(), cpu_seconds(peers)
        self._traffic = [Traffic(peer.said["dht"]) for peer in peers]

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def cpu(self) -> float:
        """Of each core's time, the part that is used."""
        return (cpu_seconds(self._peers) - self._cpu) / self.seconds / len(os.sched_getaffinity(0))

    def sent(self) -> list[int]:
        """Bytes by each peer."""
        read = [one.read() for one in self._traffic]
        return [0 if one is None else one.sent for one in read]


def measure(who: str, count: int, course: Course) -> Row:
    """A swarm from its start to its end."""
    say(f"{count} peers of {who} ...")
    part = Part(who, course.averages, round(count * BATCH * course.epoch / course.step), course.step)
    patience = 120.0 + 10 * course.epoch
    with starting() as start:
        peers: list[Peer] = []
        while len(peers) < count:
            lot = min(AT_A_TIME, count - len(peers)) if peers else 1
            peers += [start(part, peers[:1], take_part) for _ in range(lot)]
            for peer in peers[-lot:]:
                peer.wait_for("dht")
        began = _begin(peers, course.lot or count, patience)
        first = settled_epoch(peers, patience)
        meter = Meter(peers)
        for peer in peers:
            peer.wait_for_epoch(first + course.epochs, patience + course.epochs * course.epoch)
        cpu, seconds = meter.cpu(), meter.seconds
        sent = meter.sent()
        row = _row(who, peers, first, course.epochs, began)
        for peer in peers:
            peer.tell("stop")
    passed = seconds / row.epoch
    return replace(row, sent=statistics.mean(sent) / passed, most_sent=max(sent) / passed, cpu=cpu)


def _begin(peers: Sequence[Peer], lot: int, patience: float) -> float:
    """Let them begin; gives the time of the last order."""
    for start in range(0, len(peers), lot):
        have_begun, began = peers[: start + lot], time.monotonic()
        for peer in have_begun[start:]:
            peer.tell("begin")
        if len(have_begun) < len(peers):
            for peer in have_begun:
                peer.wait_until(partial(_sees, peer, len(have_begun)), "it had met the others", patience)
    return began


def _sees(peer: Peer, count: int) -> bool:
    return "seen" in peer.said and peer.said["seen"].peers >= count


def _row(who: str, peers: Sequence[Peer], first: int, epochs: int, began: float) -> Row:
    last = first + epochs
    ends: list[tuple[Passed, Passed]] = [(peer.wait_for_epoch(first), peer.wait_for_epoch(last)) for peer in peers]
    asked = [
        [(after - before) / epochs for before, after in zip(one.asked, other.asked, strict=True)] for one, other in ends
    ]
    all_ends = [[peer.wait_for_epoch(epoch).at for peer in peers] for epoch in range(first + 1, last + 1)]
    have_met = all(_sees(peer, len(peers)) for peer in peers)
    sizes = [one.group_size for peer in peers for one in list(peer.epochs) if first < one.epoch <= last]
    return Row(
        who=who,
        peers=len(peers),
        epoch=statistics.mean(other.at - one.at for one, other in ends) / epochs,
        asked=dict(zip(KINDS, (statistics.mean(kind) for kind in zip(*asked, strict=True)), strict=True)),
        answered=max(other.answered - one.answered for one, other in ends) / epochs,
        met=max(peer.said["seen"].at for peer in peers) - began if have_met else None,
        known=statistics.median(max(at) - min(at) for at in all_ends),
        group_size=statistics.mean(sizes),
    )


def law(who: str, what: str, values: Sequence[tuple[int, float]]) -> Law | None:
    """What the values follow; ``None`` of fewer than three.

    :param values: number of peers, and what was measured
    """
    known = [(count, value) for count, value in values if value > 0]
    if len(known) < 3:
        return None
    counts, measured = np.log(np.array(known, dtype=float)).T
    power, logarithm = np.polyfit(counts, measured, 1)
    off = np.abs(measured - (power * counts + logarithm)).max()
    many = math.exp(logarithm + power * math.log(MANY))
    return Law(who, what, math.exp(logarithm), float(power), math.exp(off), many)


MEASURES: dict[str, Callable[[Row], float]] = {
    "remote calls of a peer in an epoch": lambda row: row.messages,
    "answered by the busiest": lambda row: row.answered,
    "bytes sent by a peer in an epoch": lambda row: row.sent,
    "bytes sent by the busiest": lambda row: row.most_sent,
    "seconds until all have met": lambda row: row.met or 0.0,
    "seconds until all know of an epoch's end": lambda row: row.known,
}


def laws(rows: Sequence[Row]) -> list[Law]:
    """Of all measures, by who was measured, for more than :data:`REPLICAS` peers; without what kept all cores busy."""
    counted = [row for row in rows if row.cpu < BUSY and row.peers > REPLICAS]
    found = [
        law(who, what, [(row.peers, value(row)) for row in counted if row.who == who])
        for who in dict.fromkeys(row.who for row in rows)
        for what, value in MEASURES.items()
    ]
    return [one for one in found if one is not None]


def beside(rows: Sequence[Row]) -> list[tuple[int, float, float]]:
    """Number of peers, and how many times as many calls and bytes plain hivemind needs."""
    plain = {row.peers: row for row in rows if row.who == "hivemind"}
    ours = [row for row in rows if row.who == "hivenb" and row.peers in plain]
    return [
        (row.peers, plain[row.peers].messages / row.messages, plain[row.peers].sent / max(row.sent, 1.0))
        for row in ours
    ]


def _line(row: Row) -> list[str]:
    return [
        row.who,
        str(row.peers),
        f"{row.epoch:.1f}",
        f"{row.messages:.1f}",
        " + ".join(f"{row.asked[kind]:.1f}" for kind in KINDS),
        f"{row.answered:.0f}",
        f"{row.sent / 1e3:.1f}",
        f"{row.most_sent / 1e3:.0f}",
        "never" if row.met is None else f"{row.met:.2f}",
        f"{row.known:.2f}",
        f"{row.group_size:.2f}",
        f"{row.cpu:.2f}" + (" (the limit)" if row.cpu >= BUSY else ""),
    ]


HEADS = [
    "",
    "peers",
    "epoch, s",
    "calls",
    "find + store + ping + other",
    "busiest answers",
    "sent, kB",
    "busiest, kB",
    "met, s",
    "end known, s",
    "group",
    "cores",
]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--peers", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    options.add_argument("--plain", type=int, nargs="*", default=[2, 4, 8, 16], help="of plain hivemind's as well")
    options.add_argument("--epoch", type=float, default=10.0, help="seconds of an epoch")
    options.add_argument("--step", type=float, default=0.5, help="seconds of a batch")
    options.add_argument("--epochs", type=int, default=4, help="that count, after the start")
    options.add_argument("--lot", type=int, help="that begin at a time, when those before have met; by default all")
    options.add_argument("--rounds", action="store_true", help="look for groups and average one number, too")
    given = options.parse_args(arguments)
    if given.quick:
        given.peers, given.plain, given.lot = [2, 3], [2], 2
        given.epoch, given.step, given.epochs = 2.0, 0.25, 2
    print(machine())
    course = Course(given.epoch, given.step, given.epochs, given.rounds, given.lot)
    rows: list[Row] = []
    for count in sorted({*given.peers, *given.plain}):
        for who, counts in (("hivenb", given.peers), ("hivemind", given.plain)):
            if count in counts:
                rows.append(measure(who, count, course))
                say("  ".join(_line(rows[-1])))
                write_json(given.json, rows, course=asdict(course))  # the largest may be too much for the machine
    print(table(HEADS, [_line(row) for row in rows]))
    found = laws(rows)
    for one in found:
        print(
            f"{one.who}, {one.what}: {one.factor:.3g} * n^{one.power:.2f}, off by {one.off_by:.2f} times at most; "
            f"of {MANY:,} peers: {one.for_many:,.4g}"
        )
    ratios = beside(rows)
    for count, calls, sent in ratios:
        print(f"{count} peers of plain hivemind make {calls:.1f} times the calls, and send {sent:.1f} times the bytes")
    write_json(given.json, rows, laws=[asdict(one) for one in found], beside=ratios, course=asdict(course))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
