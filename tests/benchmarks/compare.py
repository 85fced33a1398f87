"""Compares the speed of this tree with that of a revision: the same benchmarks with both, in turns.

A worktree of the revision is made for as long as it takes. Each pair is one run with either, one right after the other,
first the one and next time the other, so that whatever else the machine does hits both alike. The ratio of a pair is
this tree's figure to the revision's: above 1 where this tree is better. The exit status is 1 where the median of a
figure's ratios is below 0.98. On a machine that does nothing else; rows over simulated lines need root, and say so.

    python -m tests.benchmarks.compare HEAD~1
    python -m tests.benchmarks.compare v0.5 --only overhead rounds --pairs 7
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:  # as it is when a benchmark is run by its file
    sys.path.insert(0, str(HERE))

from swarm_bench import machine, parser, say, table, write_json  # noqa: E402

ROOT = HERE.parents[1]
#: A median ratio below this is a loss.
WORSE = 0.98

Figures = dict[str, float]


@dataclass(frozen=True)
class Benchmark:
    """A script, and what of its rows is compared.

    :param command: its file and arguments
    :param quick: the same for a look whether it works
    :param figure: of a row, the name of a figure and the figure, the higher the better; ``None`` of a row that does not
      count
    """

    command: tuple[str, ...]
    quick: tuple[str, ...]
    figure: Callable[[dict[str, Any]], tuple[str, float] | None]


def _of_overhead(row: dict[str, Any]) -> tuple[str, float] | None:
    if row["who"] == row["against"]:
        return None
    return f"steps: {row['model']} of {row['parameters']:,}, {row['who']}", 1 / row["ratio"]


def _of_rounds(row: dict[str, Any]) -> tuple[str, float]:
    return f"rounds: {row['peers']} peers", row["efficiency"]


def _of_overlap(row: dict[str, Any]) -> tuple[str, float]:
    case = row["case"]
    return f"overlap: {case['peers']} peers, {case['parameters']:,}, {row['way']}", row["efficiency"]


def _of_internet(row: dict[str, Any]) -> tuple[str, float]:
    return f"internet: {row['name']}", row["efficiency"]


BENCHMARKS = {
    "overhead": Benchmark(("overhead.py", "--no-convolutions"), ("overhead.py", "--quick"), _of_overhead),
    "rounds": Benchmark(
        ("rounds.py", "--peers", "2", "4", "8", "--epoch", "2.4"), ("rounds.py", "--quick"), _of_rounds
    ),
    "overlap": Benchmark(
        ("overlap.py", "--peers", "2", "4", "--parameters", "100000"), ("overlap.py", "--quick"), _of_overlap
    ),
    "internet": Benchmark(
        ("internet.py", "--rows", "synchronous-2", "synchronous-4", "delays-4", "loss-0.1-4"),
        ("internet.py", "--rows", "synchronous-2", "--epochs", "2"),
        _of_internet,
    ),
}


@dataclass(frozen=True)
class Row:
    """One figure.

    :param name: of the figure
    :param before: with the revision, in each pair
    :param now: with this tree
    """

    name: str
    before: list[float]
    now: list[float]

    @property
    def ratios(self) -> list[float]:
        """Above 1 in the pairs in which this tree is better."""
        return [now / before for before, now in zip(self.before, self.now, strict=True)]

    @property
    def is_worse(self) -> bool:
        """Whether this tree loses more than chance may."""
        return statistics.median(self.ratios) < WORSE


@contextmanager
def worktree(revision: str) -> Iterator[Path]:
    """A tree of a revision, for as long as the context lasts."""
    with tempfile.TemporaryDirectory(prefix="hivenb-compare-") as folder:
        tree = Path(folder) / "tree"
        _git("worktree", "add", "--detach", str(tree), revision)
        try:
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _git(*arguments: str) -> None:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")


def scripts_for(tree: Path, script: str) -> Path:
    """The folder of the script that measures a tree.

    This tree's, so that both are measured alike; the tree's own if this one's asks for names that are not there.
    """
    tried = [sys.executable, "-c", f"import {script.removesuffix('.py')}"]
    at_ours = _environment(tree) | {"PYTHONPATH": os.pathsep.join([str(tree), str(HERE)])}
    if subprocess.run(tried, env=at_ours, cwd=tree, capture_output=True, check=False).returncode == 0:
        return HERE
    say(f"{script} of this tree does not know the revision; its own measures it")
    return tree / "tests" / "benchmarks"


def _environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree)}


def run(benchmark: Benchmark, command: Sequence[str], tree: Path, scripts: Path) -> Figures:
    """One run of a benchmark with the library of a tree."""
    with tempfile.TemporaryDirectory(prefix="hivenb-compare-") as folder:
        file = Path(folder) / "rows.json"
        script, *arguments = command
        whole = [sys.executable, str(scripts / script), *arguments, "--json", str(file)]
        done = subprocess.run(whole, env=_environment(tree), cwd=tree, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed with {tree}:\n{done.stderr}")
        content = json.loads(file.read_text())
    if skipped := content.get("skipped"):
        say(f"    skipped: {skipped}")
    return dict(found for row in content["rows"] if (found := benchmark.figure(row)) is not None)


def compare(name: str, tree: Path, pairs: int, quick: bool) -> Iterator[list[Row]]:
    """One benchmark with both trees, in turns.

    :param tree: of the revision
    :returns: after each pair, the figures that both have, of all pairs so far
    """
    benchmark = BENCHMARKS[name]
    command = benchmark.quick if quick else benchmark.command
    trees = {tree: scripts_for(tree, command[0]), ROOT: HERE}
    found: dict[Path, list[Figures]] = {one: [] for one in trees}
    for pair in range(pairs):
        for one in reversed(trees) if pair % 2 else trees:
            say(f"{name}, pair {pair + 1} of {pairs}: {'this tree' if one == ROOT else 'the revision'} ...")
            found[one].append(run(benchmark, command, one, trees[one]))
        yield _rows(found[tree], found[ROOT])


def _rows(before: Sequence[Figures], now: Sequence[Figures]) -> list[Row]:
    known = [name for name in now[0] if all(name in figures for figures in (*before, *now))]
    return [Row(name, [run[name] for run in before], [run[name] for run in now]) for name in known]


def print_rows(rows: Sequence[Row]) -> None:
    cells = [
        [
            row.name,
            f"{statistics.median(row.before):.4f}",
            f"{statistics.median(row.now):.4f}",
            f"{statistics.median(row.ratios):.4f}",
            f"{min(row.ratios):.4f} to {max(row.ratios):.4f}",
            "worse" if row.is_worse else "",
        ]
        for row in rows
    ]
    print(table(["figure, the higher the better", "before", "now", "ratio", "of the pairs", ""], cells), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("revision", help="what this tree is compared with: a commit, a branch, a tag")
    options.add_argument("--pairs", type=int, help="runs with each tree; by default 5, and 1 with --quick")
    options.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS), metavar="BENCHMARK")
    given = options.parse_args(arguments)
    print(machine())
    rows: list[Row] = []
    with worktree(given.revision) as tree:
        for name in given.only:
            ended = rows
            for own in compare(name, tree, given.pairs or (1 if given.quick else 5), given.quick):
                # after each pair: a run may be ended in the middle
                rows = [*ended, *own]
                write_json(given.json, rows, revision=given.revision)
                print_rows(own)
    if len(given.only) > 1:
        print_rows(rows)
    return int(any(row.is_worse for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
