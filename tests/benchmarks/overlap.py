"""Measures how long training stands still in ``step`` when everything is averaged in the background, and when not.

The same swarm trains three times: synchronous, with all delay options, and with those and gradient buffers that are
reused, so that a step does not have to sum up gradients. The share of the time in ``step``, without the computing of
gradients, is all that is not training; of it, what step computes itself, or waits for a core of a busy machine, is told
from what it waits for otherwise, such as the network. Large models train for longer epochs, so that a round fits into
one.

    python tests/benchmarks/overlap.py --json overlap.json
    python tests/benchmarks/overlap.py --full      # 100 million parameters, too: needs 12 GiB of memory
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from bench_peer import Work
from places import LARGE_PACKET, Line, places, why_not
from swarm_bench import Course, course, machine, parser, rate_alone, say, table, write_json

DELAYS: dict[str, Any] = {
    "delay_grad_averaging": True,
    "delay_optimizer_step": True,
    "delay_state_averaging": True,
    "offload_optimizer": True,
}
#: The ways to train that are compared.
WAYS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "all delays": DELAYS,
    "and reused buffers": {**DELAYS, "reuse_grad_buffers": True},
}
SMALL, LARGE, HUGE = 100_000, (10_000_000, 50_000_000), 100_000_000
#: Of the model that is averaged over a slow link, and megabits per second of that link.
OVER_LINK, LINK = 1_000_000, 100
#: An epoch is as many seconds long as the model has so many parameters, or as it would be anyway.
PARAMETERS_PER_SECOND = 1_500_000


@dataclass(frozen=True)
class Case:
    """A swarm that is measured in each way.

    :param epoch: seconds of computing in an epoch
    :param link: megabits per second of each peer, up and down; None for the loopback interface
    """

    peers: int
    parameters: int
    epoch: float
    link: int | None = None


@dataclass(frozen=True)
class Row:
    """One swarm, one way.

    :param way: of :data:`WAYS`
    :param efficiency: samples per second over the number of peers times those of one alone, without hivemind
    """

    case: Case
    way: str
    efficiency: float
    course: Course


def cases(epoch: float, full: bool) -> list[Case]:
    sizes = [SMALL, *LARGE, *([HUGE] if full else [])]
    found = [Case(count, size, max(epoch, size / PARAMETERS_PER_SECOND)) for size in sizes for count in (2, 4)]
    return [*found, *(Case(count, OVER_LINK, epoch, LINK) for count in (2, 4))]


def measure(case: Case, epochs: int, step: float) -> list[Row]:
    """One way after the other."""
    work = Work(1, step, parameters=case.parameters)
    alone = rate_alone(work, seconds=1 + case.parameters / 1e7)
    work = replace(work, target=round(case.peers * case.epoch * alone))
    rows = []
    for way, options in WAYS.items():
        say(f"{case}, {way} ...")
        hosts: Any = nullcontext((None, [None] * case.peers))
        if case.link is not None:
            lines = [Line(up=case.link * 1e6, down=case.link * 1e6)] * case.peers
            hosts = places(lines, LARGE_PACKET)
        with hosts as (_, found):
            works = [replace(work, place=place, strategy=options) for place in found]
            came_to = course(works, epochs, patience=3 * case.epoch + 35)
        rows.append(Row(case, way, came_to.figures.rate / (case.peers * alone), came_to))
    return rows


def print_rows(rows: Sequence[Row]) -> None:
    heads = ["peers", "parameters", "link", "epoch, s", "", "in step", "waiting", "longest in an epoch, s"]
    cells = [
        [
            row.case.peers,
            row.case.parameters,
            "loopback" if row.case.link is None else f"{row.case.link} Mbit/s",
            f"{row.case.epoch:.1f}",
            row.way,
            f"{row.course.figures.in_step:.4f}",
            f"{row.course.figures.waiting:.4f}",
            f"{row.course.figures.longest:.2f}",
            f"{row.efficiency:.3f}",
            f"{row.course.figures.group_size:.2f}",
            f"{row.course.figures.failed} of {row.course.figures.rounds}",
            f"{row.course.cpu:.2f}",
        ]
        for row in rows
    ]
    print(table([*heads, "efficiency", "group", "failed", "CPU, s/s"], cells))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--epoch", type=float, default=2.5, help="seconds of computing in an epoch, at least")
    options.add_argument("--epochs", type=int, default=8, help="that count, after the start")
    options.add_argument("--step", type=float, default=0.05, help="seconds that the computing of a batch takes")
    options.add_argument("--peers", type=int, nargs="+", help="only swarms of so many")
    options.add_argument("--parameters", type=int, nargs="+", help="only models of so many")
    options.add_argument("--link", action="store_true", help="only those over a slow link")
    options.add_argument("--full", action="store_true", help=f"also {HUGE:,} parameters")
    given = options.parse_args(arguments)
    chosen = [
        case
        for case in cases(given.epoch, given.full)
        if (not given.peers or case.peers in given.peers)
        and (not given.parameters or case.parameters in given.parameters)
        and (not given.link or case.link is not None)
    ]
    if given.quick:
        chosen, given.epochs = [Case(2, SMALL, 0.5)], 3
    print(machine())
    rows: list[Row] = []
    skipped: list[str] = []
    for case in chosen:
        if case.link is not None and (reason := why_not()):
            skipped.append(f"{case} was skipped: {reason}")
        else:
            rows += measure(case, given.epochs, given.step)
    print_rows(rows)
    print(*skipped, sep="\n", end="\n" if skipped else "")
    write_json(given.json, rows, skipped=skipped)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
