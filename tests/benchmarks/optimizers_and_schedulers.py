"""Compares optimizers and schedulers in a swarm of one peer with plain torch: synchronous, offloaded and delayed.

Its target batch size is that of its batches, so that each is a step of the swarm. Where steps are delayed, plain torch
takes gradients of the parameters before the last step, too. What is printed is the largest difference between two
parameters after 12 steps, beside the largest change of one.

    python tests/benchmarks/optimizers_and_schedulers.py --json differences.json
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarm_bench import machine, parser, say, write_json

import hivenb

sys.path.insert(0, str(Path(__file__).parents[1]))

from strategy.against_torch import MODES, OPTIMIZERS, SCHEDULERS, Case, by_torch, difference, in_a_swarm, untrained


@dataclass(frozen=True)
class Row:
    """One optimizer or scheduler.

    :param moved: by how much plain torch has changed the parameter that it has changed most, without delay
    :param differences: the largest between two parameters, by mode
    """

    kind: str
    name: str
    moved: float
    differences: Mapping[str, float]


def measure(kind: str, name: str, case: Case, swarm: hivenb.Swarm) -> Row:
    say(f"{name} ...")
    moved = difference(by_torch(case, "synchronous"), untrained(case))
    return Row(
        kind, name, moved, {mode: difference(in_a_swarm(case, mode, swarm), by_torch(case, mode)) for mode in MODES}
    )


def markdown(rows: Sequence[Row]) -> str:
    """A table of the rows, as it stands in the README."""
    lines = [f"| | | moved | {' | '.join(MODES)} |", "|---" * (3 + len(MODES)) + "|"]
    for row in rows:
        figures = [f"{row.differences[mode]:.1e}" if row.differences[mode] else "0" for mode in MODES]
        lines.append(f"| {row.kind} | {row.name} | {row.moved:.2f} | {' | '.join(figures)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    given = parser(__doc__).parse_args(arguments)
    for name in ("hivemind", "lightning", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    print(machine())
    cases = [(kind, *one) for kind, of in (("optimizer", OPTIMIZERS), ("scheduler", SCHEDULERS)) for one in of.items()]
    with hivenb.Swarm("against-torch") as swarm:
        rows = [measure(*case, swarm) for case in (cases[:1] + cases[-1:] if given.quick else cases)]
    print(markdown(rows))
    write_json(given.json, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
