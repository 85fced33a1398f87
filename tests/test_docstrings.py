"""Docstrings are of one style: reST fields for parameters, results and errors, ``#:`` comments for constants."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import hivenb

PACKAGE = Path(hivenb.__file__).parent
MODULES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))

#: Headings of sections as in Google's and NumPy's styles.
SECTION = re.compile(
    r"^\s*(Parameters|Args|Arguments|Attributes|Returns|Yields|Raises|Examples?|Notes?)(:|\s*\n\s*-+)\s*$",
    flags=re.MULTILINE,
)
FIELD = re.compile(r"^\s*:(param|returns|raises)\b(.*)$", flags=re.MULTILINE)
GOOD_FIELD = re.compile(r"^(param|raises) \w+: \S|^returns: \S")


def docstrings(module: str) -> Iterator[tuple[int, str]]:
    """Where each docstring begins, and the string."""
    for node in ast.walk(ast.parse((PACKAGE / module).read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text is not None:
                yield node.body[0].lineno, text


@pytest.mark.parametrize("module", MODULES)
def test_parameters_results_and_errors_are_fields(module: str) -> None:
    for line, text in docstrings(module):
        assert SECTION.search(text) is None, f"{module}:{line} has a section; write :param x:, :returns:, :raises X:"
        for kind, rest in FIELD.findall(text):
            assert GOOD_FIELD.match(kind + rest), f"{module}:{line}: :{kind}{rest}"


@pytest.mark.parametrize("module", MODULES)
def test_strings_describe_nothing_but_what_they_are_in(module: str) -> None:
    """What is said of a constant or a field stands in a comment before it, or in its class's docstring."""
    for node in ast.walk(ast.parse((PACKAGE / module).read_text())):
        body = getattr(node, "body", None)
        for statement in body[1:] if isinstance(body, list) else ():
            is_string = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            assert not (is_string and isinstance(statement.value.value, str)), (
                f"{module}:{statement.lineno} is a string that does nothing"
            )
