"""Modules, functions and calls stay small enough to be read at a glance; what is longer is named here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import hivenb

PACKAGE = Path(hivenb.__file__).parent
MODULES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))

MOST_LINES, MOST_FUNCTION_LINES, MOST_ARGUMENTS = 350, 40, 7

#: The arguments of Lightning's documentation, each with its default, and what is made of each.
LONG_FUNCTIONS = {"HivemindStrategy.__init__"}

#: What people write themselves, by keyword: documented signatures.
MANY_PARAMETERS = {"HivemindStrategy.__init__", "Swarm.__init__"}

#: Classes of hivemind, or of ours built on them, that take their settings so, all by keyword.
MANY_ARGUMENTS = {"ProgressTracker", "TrainingStateAverager", "FaultTolerantRunner"}


@cache
def tree(module: str) -> ast.Module:
    return ast.parse((PACKAGE / module).read_text())


def functions(node: ast.AST, within: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Each function by its qualified name."""
    for child in ast.iter_child_nodes(node):
        is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        name = f"{within}{child.name}" if is_function or isinstance(child, ast.ClassDef) else ""
        if is_function:
            yield name, child
        yield from functions(child, f"{name}." if name else within)


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """With its signature, without its docstring."""
    first = function.body[0]
    docstring = first.end_lineno - first.lineno + 1 if ast.get_docstring(function) is not None else 0
    return function.end_lineno - function.lineno + 1 - docstring


@cache
def records() -> frozenset[str]:
    """Names of the package's dataclasses: a record with many fields is read by their names where it is made."""
    classes = [node for module in MODULES for node in ast.walk(tree(module)) if isinstance(node, ast.ClassDef)]
    return frozenset(one.name for one in classes if any("dataclass" in ast.unparse(d) for d in one.decorator_list))


@pytest.mark.parametrize("module", MODULES)
def test_modules_are_short(module: str) -> None:
    assert len((PACKAGE / module).read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("module", MODULES)
def test_functions_are_short_and_take_few_arguments(module: str) -> None:
    for name, function in functions(tree(module)):
        if name not in LONG_FUNCTIONS:
            assert lines_of(function) <= MOST_FUNCTION_LINES, f"{module}: {name} has {lines_of(function)} lines"
        given = function.args
        names = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        taken = [name for name in names if name not in ("self", "cls")]
        if name not in MANY_PARAMETERS:
            assert len(taken) <= MOST_ARGUMENTS, f"{module}: {name} takes {len(taken)} arguments; pass a value"


@pytest.mark.parametrize("module", MODULES)
def test_calls_have_few_arguments(module: str) -> None:
    for node in ast.walk(tree(module)):
        if not isinstance(node, ast.Call) or len(node.args) + len(node.keywords) <= MOST_ARGUMENTS:
            continue
        called = ast.unparse(node.func)
        is_by_name = not node.args and called in records() | MANY_ARGUMENTS
        assert is_by_name, f"{module}:{node.lineno}: {called}(...) has too many arguments; pass a value"


def test_every_exception_is_one() -> None:
    every = {name: function for module in MODULES for name, function in functions(tree(module))}
    assert all(lines_of(every[name]) > MOST_FUNCTION_LINES for name in LONG_FUNCTIONS)
    arguments = {name: every[name].args for name in MANY_PARAMETERS}
    assert all(len(given.args + given.kwonlyargs) > 1 + MOST_ARGUMENTS for given in arguments.values())
