"""Measures how much of the computing of peers across a simulated internet becomes training.

Each peer is on a host of its own (``tests/network/internet.py``): 100 ms there and back, 50 Mbit/s each way, a little
jitter, and packets that get lost where a row says so. Computing is a fixed wait; efficiency is samples per second of n
peers over n times the rate of one alone, and bytes are all that a host puts on its line. In rows called ``away``, the
line of one of three peers is cut for some seconds. Needs root, and says so. With ``--line-rate``, rounds of averaging
are measured against what the lines allow, instead; with ``--transports``, those over TCP and QUIC where packets get
lost.

    python tests/benchmarks/internet.py --plain --json internet.json
    python tests/benchmarks/internet.py --rows synchronous-2 delays-2
    python tests/benchmarks/internet.py --line-rate
    python tests/benchmarks/internet.py --transports
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache

import away
import bench_peer
import line_rate
import transports
from bench_peer import Work
from overlap import DELAYS
from places import Line, places, why_not
from swarm_bench import Course, Target, course, machine, parser, rate_alone, say, table, write_json

#: A quarter of the way there and back, and a little jitter: two hosts are two lines apart.
HOME = Line(delay=0.025, jitter=0.002, up=50e6, down=50e6)

TINY, LARGE = 10_000, 1_000_000
#: Seconds of a step, and of one of so many peers that their cores would not suffice for short ones.
STEP, STEP_OF_MANY, MANY = 0.05, 0.24, 8
#: Seconds of an epoch from which on half as many are measured.
LONG = 10.0

TARGETS: dict[str, Target] = {"hivenb": bench_peer.with_strategy, "hivemind": bench_peer.with_plain_hivemind}


@dataclass(frozen=True)
class Case:
    """A swarm that is measured.

    :param epoch: seconds of computing in an epoch; long enough for a round where all is averaged in the background
    :param overlaps: whether all delay options are on
    :param loss: share of the packets from one host to another that get lost
    """

    peers: int
    parameters: int = TINY
    epoch: float = 2.4
    overlaps: bool = False
    loss: float = 0.0

    @property
    def line(self) -> Line:
        """Of each host; a packet is on two of them."""
        return HOME | {"loss": self.loss / 2}

    @property
    def step(self) -> float:
        return STEP_OF_MANY if self.peers >= MANY else STEP


CASES = {
    **{f"synchronous-{count}": Case(count) for count in (2, 4)},
    **{f"delays-{count}": Case(count, overlaps=True) for count in (2, 4, 8)},
    **{f"loss-0.1-{count}": Case(count, LARGE, 10.0, True, 0.001) for count in (2, 4)},
    **{f"loss-1-{count}": Case(count, LARGE, 30.0, True, 0.01) for count in (2, 4)},
}
#: Seconds for which a peer is away.
AWAY = {"away-2": 2.0, "away-10": 10.0, "away-60": 60.0}


@dataclass(frozen=True)
class Row:
    """One swarm.

    :param who: hivenb, or plain hivemind
    :param efficiency: 1 if nothing were lost
    :param epochs: that were measured
    """

    name: str
    who: str
    case: Case
    efficiency: float
    course: Course
    epochs: int


def measure(name: str, who: str, epochs: int) -> Row:
    """A swarm, from its start on.

    :param epochs: after the start
    """
    case = CASES[name]
    alone = alone_at(case.step, case.parameters)
    work = Work(
        target=case.peers * round(case.epoch / case.step) * Work.batch,
        step=case.step,
        parameters=case.parameters,
        strategy=DELAYS if case.overlaps else {},
    )
    hosts = range(case.peers)
    with places([case.line] * case.peers) as (internet, found):
        came_to = course(
            [work.at(place) for place in found],
            epochs,
            patience=3 * case.epoch + 35,
            target=TARGETS[who],
            bytes_sent=lambda: sum(map(internet.bytes_sent, hosts)),
        )
    return Row(name, who, case, came_to.figures.rate / (case.peers * alone), came_to, epochs)


@cache
def alone_at(step: float, parameters: int) -> float:
    """Samples per second of one without hivemind."""
    return rate_alone(Work(1, step, parameters=parameters), seconds=2.5 + parameters / 1e6)


def print_rows(rows: Sequence[Row]) -> None:
    heads = ["", "", "peers", "parameters", "epoch, s", "lost", "mode", "efficiency", "in step", "longest, s", "group"]
    cells = [
        [
            row.name,
            row.who,
            row.case.peers,
            row.case.parameters,
            f"{row.case.epoch:.1f}",
            f"{100 * row.case.loss:.1f} %",
            "all delays" if row.case.overlaps else "synchronous",
            f"{row.efficiency:.3f}",
            f"{row.course.figures.in_step:.3f}",
            f"{row.course.figures.longest:.2f}",
            f"{row.course.figures.group_size:.2f}",
            f"{row.course.figures.failed} of {row.course.figures.rounds}",
            f"{row.course.sent / 1e3:,.0f}",
            row.epochs,
            f"{row.course.cpu:.2f}",
        ]
        for row in rows
    ]
    print(table([*heads, "failed", "sent by one in an epoch, kB", "epochs", "CPU, s/s"], cells))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    known = [*CASES, *AWAY]
    options.add_argument("--rows", nargs="+", choices=known, default=known, metavar="NAME", help=", ".join(known))
    options.add_argument("--plain", action="store_true", help="plain hivemind beside")
    options.add_argument("--epochs", type=int, default=8, help=f"that count, after the start; half if of {LONG:.0f} s")
    options.add_argument("--line-rate", action="store_true", help="rounds against what the lines allow, instead")
    options.add_argument("--transports", action="store_true", help="rounds over TCP and QUIC, instead")
    given = options.parse_args(arguments)
    print(machine())
    if reason := why_not():
        print(f"skipped: {reason}")
        write_json(given.json, [], skipped=reason)
        return 0
    if given.line_rate:
        return line_rate.main(given.json, given.quick)
    if given.transports:
        return transports.main(given.json, given.quick, HOME)
    if given.quick:
        given.rows, given.epochs = ["synchronous-2", "away-2"], 2
    rows: list[Row] = []
    were_away: list[away.Row] = []
    broken: list[str] = []
    for name in given.rows:
        for who in TARGETS if given.plain else ["hivenb"]:
            say(f"{name}, {who} ... (load {os.getloadavg()[0]:.1f})")
            try:
                if name in CASES:
                    epochs = given.epochs if CASES[name].epoch < LONG else max(2, given.epochs // 2)
                    rows.append(measure(name, who, epochs))
                    say(f"    efficiency {rows[-1].efficiency:.3f}, group {rows[-1].course.figures.group_size:.2f}")
                else:
                    rate = alone_at(STEP, TINY)
                    were_away.append(away.measure(who, TARGETS[who], away.Absence(AWAY[name], HOME), rate))
                    say(f"    {were_away[-1]}")
            except RuntimeError as e:  # a peer that stands still, or has ended; the other rows are worth having
                broken.append(f"{name}, {who}: {e}")
                say(f"    {e}")
            besides = {"away": [asdict(row) for row in were_away], "broken": broken, "load_then": os.getloadavg()[0]}
            write_json(given.json, rows, **besides)  # after each row: a run may be ended in the middle
    if rows:
        print_rows(rows)
    if were_away:
        away.print_rows(were_away)
    print(*broken, f"load at the end: {os.getloadavg()[0]:.1f}", sep="\n")
    return bool(broken)


if __name__ == "__main__":
    raise SystemExit(main())
