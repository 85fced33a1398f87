"""What the package says of hivemind's source, and what it takes of its privates, is there in the installed version."""

from __future__ import annotations

import ast
import multiprocessing
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import hivemind
import torch

import hivenb

PACKAGE, UPSTREAM = Path(hivenb.__file__).parent, Path(hivemind.__file__).parent

#: Privates of others than hivemind that the engine takes, by who has them.
OTHERS = {
    "_exit": os,
    "_device": torch.amp.GradScaler("cpu"),
    "_version": torch.zeros(1),
    **{f"_foreach_{name}": torch for name in ("norm", "add_", "copy_", "mul_", "zero_")},
    "_semlock": multiprocessing.Lock(),
    "_count": multiprocessing.Lock()._semlock,  # type: ignore[attr-defined]
    "_extra_reducers": ForkingPickler,
    "_config": multiprocessing.current_process(),
    "_buffers": torch.nn.Module(),
    "_parameters": torch.nn.Module(),
    "_non_persistent_buffers_set": torch.nn.Module(),
}

_REFERENCE = re.compile(r"(the method of )?`*hivemind/([\w/]+\.py)(?:`*:([\w.]*\w))?")


@dataclass(frozen=True)
class Reference:
    """A place in hivemind's source that is named in ours, such as ``hivemind/dht/dht.py:DHT.run``.

    :param where: our file and line
    :param path: theirs
    :param name: of a class or function in it, perhaps within a class; empty if there is none
    """

    where: str
    path: str
    name: str

    def __str__(self) -> str:
        return f"{self.where}-{self.path}:{self.name}"

    @property
    def is_there(self) -> bool:
        file = UPSTREAM / self.path
        if not file.is_file():
            return False
        known = definitions(file)
        return not self.name or any(one == self.name or one.endswith(f".{self.name}") for one in known)


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def definitions(file: Path) -> frozenset[str]:
    """Classes and functions of a module, with the names of the classes and functions that they are in."""
    found: set[str] = set()

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(prefix + child.name)
                visit(child, f"{prefix}{child.name}.")
            else:
                visit(child, prefix)

    visit(parsed(file), "")
    return frozenset(found)


def references_in(text: str, where: str) -> Iterator[Reference]:
    """Where the words are "the method of" a file, that has the name of ours in which they stand."""
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    for number, line in enumerate(text.splitlines(), start=1):
        for match in _REFERENCE.finditer(line):
            of_method, path, name = match.groups()
            if of_method:
                around = [one for one in functions if one.lineno <= number <= (one.end_lineno or 0)]
                name = max(around, key=lambda one: one.lineno).name
            yield Reference(f"{where}:{number}", path, name or "")


ALL = [one for file in sorted(PACKAGE.rglob("*.py")) for one in references_in(file.read_text(), file.stem)]


def test_what_a_comment_names_is_there() -> None:
    assert [str(one) for one in ALL if not one.is_there] == []


def test_comments_name_what_they_replace() -> None:
    assert len(ALL) > 30
    named = {(one.path, one.name) for one in ALL}
    assert named >= {
        ("dht/dht.py", "DHT.run"),
        ("optim/progress_tracker.py", "_progress_fetcher"),
        ("optim/grad_averager.py", "load_accumulators_into_averager_"),
        ("utils/mpfuture.py", ""),
    }


def test_what_is_not_there_is_missed() -> None:
    text = "def _run():\n    # Replaces the method of hivemind/dht/dht.py, and not hivemind/dht/dht.py:DHT.run or :x\n"
    text += "    pass  # ``hivemind/no/such.py``, hivemind/dht/dht.py:run, hivemind/dht/dht.py:Node.run. Nor DHT\n"
    found = {(one.path, one.name): one.is_there for one in references_in(text, "here")}
    assert found == {
        ("dht/dht.py", "_run"): True,
        ("dht/dht.py", "DHT.run"): True,
        ("no/such.py", ""): False,
        ("dht/dht.py", "run"): True,
        ("dht/dht.py", "Node.run"): False,
    }


# -- privates -----------------------------------------------------------------------------------------------------


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name.strip("_") != ""


def taken(tree: ast.Module) -> set[str]:
    """Privates of any object that are read or called."""
    return {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and is_private(n.attr)}


def given(tree: ast.Module) -> set[str]:
    """Names that are defined or set, of modules and classes and of any object."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return found


@cache
def upstream_gives() -> frozenset[str]:
    return frozenset().union(*(given(parsed(file)) for file in UPSTREAM.rglob("*.py")))


TREES = {file: parsed(file) for file in sorted((PACKAGE / "engine").rglob("*.py"))}
FOREIGN = sorted(set().union(*map(taken, TREES.values())) - set().union(*map(given, TREES.values())))


def test_the_privates_of_others_are_there() -> None:
    missing = [one for one in FOREIGN if not (hasattr(OTHERS[one], one) if one in OTHERS else one in upstream_gives())]
    assert missing == []


def test_privates_are_found() -> None:
    assert set(FOREIGN) >= {"_child", "_client_listen_maddr", "_record_validator"}
    assert set(FOREIGN) >= OTHERS.keys()
    assert "_client" in upstream_gives(), "which ours sets anew"
    assert "_no_such_thing" not in upstream_gives()
    assert upstream_gives().isdisjoint(OTHERS)
