"""The map, ``hivenb/ARCHITECTURE.md``, names files that are there, and ``hivenb/THREADS.md`` tells the truth."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

import hivenb

PACKAGE = Path(hivenb.__file__).parent
MAP, THREADS = PACKAGE / "ARCHITECTURE.md", PACKAGE / "THREADS.md"
WITNESS = Path(__file__).with_name("lock_witness.py")

LOCKS = ("Lock", "RLock", "Condition")


def table(heading: str, page: Path = THREADS) -> list[list[str]]:
    """The cells of the first table under a heading, without its head."""
    section = page.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in row] for row in rows[2:]]


def calls() -> Iterator[tuple[str, ast.Call, str | None]]:
    """Each call in the package: in which file, and what its result is called there if it gets a name."""
    for path in PACKAGE.rglob("*.py"):
        name_of: dict[int, str] = {}
        for node in ast.walk(tree := ast.parse(path.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
                name_of[id(node.value)] = str(getattr(targets[0], "attr", getattr(targets[0], "id", None)))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield str(path.relative_to(PACKAGE)), node, name_of.get(id(node))


def called(call: ast.Call) -> str:
    """The function's own name; that of multiprocessing's locks is another matter."""
    function: Any = call.func
    of = getattr(getattr(function, "value", None), "id", "threading")
    return str(getattr(function, "attr", getattr(function, "id", ""))) if of == "threading" else ""


def thread_name(call: ast.Call) -> str:
    """As a pattern; of a thread without a name, nothing."""
    value = next((keyword.value for keyword in call.keywords if keyword.arg == "name"), None)
    if isinstance(value, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "*" for part in value.values)
    return str(value.value) if isinstance(value, ast.Constant) else ""


def test_the_threads_are_those_that_are_started() -> None:
    started = {(thread_name(call), file) for file, call, _ in calls() if called(call) == "BackgroundThread"}
    assert {(name, file) for name, file, *_ in table("Threads")} == started


def test_the_locks_are_those_that_are_made() -> None:
    made = {(name, file) for file, call, name in calls() if called(call) in LOCKS and name is not None}
    unnamed = [file for file, call, name in calls() if called(call) in LOCKS and name is None and not is_inner(call)]
    assert unnamed == []
    rows = [(name, file) for name, file, _ in table("Locks")]
    assert set(rows) == made
    assert len(rows) == len(made), "each has one place in the order"


def is_inner(call: ast.Call) -> bool:
    """Whether it is the lock of a condition, which has a name of its own."""
    return called(call) == "RLock"


def test_the_layers_name_all_that_lies_in_the_package() -> None:
    packages = {package for _, cell, _ in table("Layers", MAP) for package in re.findall(r"[\w.]+", cell)}
    there = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert there - {"__init__", "__main__"} <= packages


def test_every_file_on_it_is_there() -> None:
    named = set(re.findall(r"([\w/]+/\w+\.py)", MAP.read_text() + THREADS.read_text()))
    assert len(named) > 30
    assert {name for name in named if not (PACKAGE / name).exists() and not (PACKAGE.parent / name).exists()} == set()


@pytest.mark.process
@pytest.mark.slow
def test_a_training_with_everything_on_takes_locks_in_that_order_and_has_no_other_threads() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), str(WITNESS.parent)])}
    done = subprocess.run(
        [sys.executable, str(WITNESS)], capture_output=True, text=True, timeout=170, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    order = [f"{file} {name}" for name, file, _ in table("Locks")]
    assert len(seen["nested"]) > 5
    assert [(outer, inner) for outer, inner in seen["nested"] if order.index(outer) >= order.index(inner)] == []
    known = [*re.findall(r"`([^`]+)`", THREADS.read_text().partition("\n## Threads\n")[2].partition("\n## ")[0])]
    strangers = {name for name in seen["threads"] if not any(fnmatchcase(name, one) for one in known)}
    assert strangers <= {"MainThread"}
