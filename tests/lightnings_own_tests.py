"""Runs Lightning's own tests with its default strategy and with hivenb's.

``python tests/lightnings_own_tests.py FOLDER``, where
``FOLDER`` is ``tests`` in a clone of https://github.com/Lightning-AI/pytorch-lightning, of the version that is
installed. With hivenb, each Trainer that a test makes without a strategy gets :class:`hivenb.HivemindStrategy`, alone
in its run, with a target of one batch, so that each batch is a swarm epoch. A table says, file by file, how
many tests have passed each way; below it is each test that passed with Lightning's alone, and why.

As a plugin of pytest (``-p lightnings_own_tests``) this module is what gives the strategy.
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

#: Folders and files of Lightning's tests, each run in a process of its own.
SETS = ("trainer/optimization", "trainer/logging_", "callbacks", "loops", "core")

HERE = Path(__file__).resolve().parent


# -- the plugin ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session", autouse=True)
def with_hivenb() -> Iterator[None]:
    """Gives the strategy to each Trainer that is made without one."""
    from lightning import Trainer

    import hivenb

    create = Trainer.__init__
    number = iter(range(1_000_000))

    @functools.wraps(create)
    def with_strategy(self: Any, *args: Any, **kwargs: Any) -> None:
        if not args and kwargs.get("strategy", "auto") == "auto":
            kwargs["strategy"] = hivenb.HivemindStrategy(1, f"own-tests-{next(number)}", dht=swarm.dht)
        create(self, *args, **kwargs)

    with hivenb.Swarm("lightnings-own-tests") as swarm:
        Trainer.__init__ = with_strategy
        yield
        Trainer.__init__ = create


# -- the program ---------------------------------------------------------------------------------------------------

Outcomes = dict[tuple[str, str], tuple[str, str]]


def run(tests: Path, chosen: str, *, hivenb: bool, timeout: int) -> Outcomes:
    """Run a folder or file of Lightning's tests.

    :param tests: Lightning's folder of that name
    :param chosen: below ``tests_pytorch`` in it
    :param hivenb: whether with hivenb's strategy
    :param timeout: seconds for each test
    :returns: by file and name of a test, how it ended, and why
    """
    paths = [tests, *([HERE.parent, HERE] if hivenb else [])]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        subprocess.run(
            [
                *(sys.executable, "-m", "pytest", chosen, "-q", "--tb=short", "-p", "no:cacheprovider"),
                *("-o", "addopts="),  # it is strict about marks of plugins that need not be there
                *(f"--timeout={timeout}", f"--junitxml={report}", f"--basetemp={folder}/tests"),
                *(["-p", Path(__file__).stem] if hivenb else []),
            ],
            cwd=tests / "tests_pytorch",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
            stdout=sys.stderr,
        )
        return dict(sorted(_outcomes(report)))


def _outcomes(report: Path) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    known: Outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        where, name = case.get("classname", ""), case.get("name", "")
        of = next((one for one in case if one.tag in ("failure", "error", "skipped")), None)
        ended = "passed" if of is None else {"failure": "failed", "error": "error", "skipped": "skipped"}[of.tag]
        why = "" if of is None else " ".join((of.get("message") or "").split())
        if known.get((where, name), ("passed", ""))[0] == "passed":  # an error at the end of a test comes beside it
            known[where, name] = ended, why
    yield from known.items()


def table(plain: Outcomes, ours: Outcomes) -> str:
    """What has passed each way, file by file, as a table in Markdown, and below it what differs."""
    by_file = defaultdict(list)
    for where, name in sorted(plain.keys() | ours.keys()):
        by_file[where.split(".Test")[0]].append((where, name))
    lines = ["| file | tests | passed | with hivenb |", "|---|---|---|---|"]
    differing = []
    for file, tests in by_file.items():
        ends = [(plain.get(test, ("missing", ""))[0], ours.get(test, ("missing", ""))[0]) for test in tests]
        counted = [pair for pair in ends if pair != ("skipped", "skipped")]
        passed = [sum(end == "passed" for end in of) for of in zip(*counted, strict=True)] if counted else [0, 0]
        lines.append(f"| {file.removeprefix('tests_pytorch.')} | {len(counted)} | {passed[0]} | {passed[1]} |")
        differing += [test for test, (one, other) in zip(tests, ends, strict=True) if one == "passed" != other]
    lines.append("")
    for test in differing:
        ended, why = ours.get(test, ("missing", ""))
        lines.append(f"- {'.'.join(test).removeprefix('tests_pytorch.')}: {ended}: {why[:300]}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="Lightning's tests")
    parser.add_argument("sets", nargs="*", default=SETS, help="which of them, below tests_pytorch")
    parser.add_argument("--timeout", type=int, default=120, help="seconds for each test")
    given = parser.parse_args()
    plain: Outcomes = {}
    ours: Outcomes = {}
    for chosen in given.sets:
        plain |= run(given.folder.resolve(), chosen, hivenb=False, timeout=given.timeout)
        ours |= run(given.folder.resolve(), chosen, hivenb=True, timeout=given.timeout)
        print(table(plain, ours), flush=True)


if __name__ == "__main__":
    main()
