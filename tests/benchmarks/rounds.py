"""Measures how much of the computing of n peers becomes training, against one alone without hivemind.

Efficiency is samples per second of n peers over n times the rate of one; computing is a fixed wait in each step. The
first two epochs of a peer are its start, and printed apart. With ``--plain``, the same swarms of plain
``hivemind.Optimizer`` with the same arguments are measured beside, and two peers with epochs of half a second. With
``--rules``, the same swarms with each rule for averages, and with peers that look at nothing of what others send. With
``--churn``, what the others lose when a peer joins, is killed, is cut off, or leaves.

    python tests/benchmarks/rounds.py --peers 2 4 8 --plain --json rounds.json
    python tests/benchmarks/rounds.py --peers 4 --rules
    python tests/benchmarks/rounds.py --churn
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import bench_peer
import churn
import hivemind
from bench_peer import Work
from swarm_bench import (
    Course,
    course,
    machine,
    parser,
    rate_alone,
    say,
    table,
    write_json,
)

from hivenb.engine.averaging import gradient_averager
from hivenb.engine.exchange.reducer import FaultTolerantReducer
from hivenb.engine.optimizer.optimizer import Optimizer
from hivenb.engine.trust.aggregation import CheckedParts
from hivenb.options.kinds import AGGREGATIONS

#: Seconds of a step, and of one of so many peers that their cores would not suffice for short ones.
STEP, STEP_OF_MANY, MANY = 0.05, 0.25, 8


def without_checks(*args: Any) -> None:
    """As the strategy, in a process that takes what it is sent for what it should be."""
    FaultTolerantReducer._checked = lambda self, part_index, part, weight: (weight, 0.0)
    CheckedParts.check_part = lambda self, peer_index, part_index, part: None
    Optimizer._load_averaged_gradients_into_optimizer_ = hivemind.Optimizer._load_averaged_gradients_into_optimizer_
    gradient_averager.are_finite = lambda tensors: True
    bench_peer.with_strategy(*args)


TARGETS = {"hivenb": bench_peer.with_strategy, "hivemind": bench_peer.with_plain_hivemind}
#: hivenb with such a rule for averages, by how a row is called.
RULED = {"no checks": (without_checks, "none"), **{rule: (bench_peer.with_strategy, rule) for rule in AGGREGATIONS}}


@dataclass(frozen=True)
class Row:
    """One swarm.

    :param who: hivenb, plain hivemind, or a rule for averages
    :param epoch: seconds that an epoch would take without hivemind
    :param efficiency: 1 if nothing were lost
    """

    who: str
    peers: int
    epoch: float
    step: float
    efficiency: float
    course: Course


def measure(
    who: str, count: int, epoch: float, step: float, epochs: int, alone: float, parameters: int = Work.parameters
) -> Row:
    """A swarm, from its start on.

    :param epochs: after the start
    :param alone: samples per second of one without hivemind
    """
    work = Work(target=count * round(epoch / step) * Work.batch, step=step, parameters=parameters)
    target = TARGETS.get(who)
    if target is None:
        target, rule = RULED[who]
        work = replace(work, strategy={"robust_aggregation": rule})
    found = course([work] * count, epochs, patience=epoch + 35, target=target)
    return Row(who, count, epoch, step, found.figures.rate / (count * alone), found)


def print_rows(rows: Sequence[Row]) -> None:
    heads = ["", "peers", "epoch, s", "step, s", "efficiency", "stalled", "in step", "longest, s"]
    heads += ["group", "failed", "CPU, s/s", "first epochs: stalled, s (group)"]
    cells = [
        [
            row.who,
            row.peers,
            f"{row.epoch:.1f}",
            f"{row.step:.2f}",
            f"{row.efficiency:.3f}",
            f"{row.course.figures.stalled:.3f}",
            f"{row.course.figures.in_step:.3f}",
            f"{row.course.figures.longest:.2f}",
            f"{row.course.figures.group_size:.2f}",
            f"{row.course.figures.failed} of {row.course.figures.rounds}",
            f"{row.course.cpu:.2f}",
            ", ".join(f"{stalled:.2f} ({group})" for stalled, group in row.course.start),
        ]
        for row in rows
    ]
    print(table(heads, cells))
    quick = {row.who: row.efficiency for row in rows if row.epoch == 0.5 and row.peers == 2}
    if quick.keys() == TARGETS.keys():
        print(f"2 peers, epochs of 0.5 s: hivenb trains {quick['hivenb'] / quick['hivemind']:.1f} times as fast")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--peers", type=int, nargs="+", default=[2, 4, 8])
    options.add_argument("--epoch", type=float, default=2.5, help="seconds of computing in an epoch")
    options.add_argument("--epochs", type=int, default=10, help="that count, after the start")
    options.add_argument("--step", type=float, help=f"seconds; {STEP}, with {MANY} peers or more {STEP_OF_MANY}")
    options.add_argument("--parameters", type=int, default=Work.parameters, help="of the model")
    options.add_argument("--plain", action="store_true", help="plain hivemind beside")
    options.add_argument("--rules", action="store_true", help="each rule for averages, and no checks, instead")
    options.add_argument("--churn", action="store_true", help="peers that come and go, instead")
    given = options.parse_args(arguments)
    if given.quick:
        given.peers, given.epoch, given.epochs = [2], 0.5, 3
    print(machine())
    if given.churn:
        return churn.main(given.epoch, given.step or STEP, given.json, given.quick)
    configurations = [(count, given.epoch) for count in given.peers]
    if given.plain and (2, 0.5) not in configurations:
        configurations.append((2, 0.5))
    alone: dict[float, float] = {}
    rows = []
    for count, epoch in configurations:
        step = given.step or (STEP_OF_MANY if count >= MANY else STEP)
        if step not in alone:
            alone[step] = rate_alone(Work(target=1, step=step))
        for who in RULED if given.rules else TARGETS if given.plain else ["hivenb"]:
            say(f"{who}: {count} peers, epochs of {epoch} s ...")
            rows.append(measure(who, count, epoch, step, given.epochs, alone[step], given.parameters))
    print_rows(rows)
    print("One alone, samples per second:", ", ".join(f"{rate:.1f} (step {step} s)" for step, rate in alone.items()))
    write_json(given.json, rows, alone=alone)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
