"""Docstrings are of one style: reST fields for parameters, results and errors, ``#:`` comments for constants."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

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


def test_parameters_results_and_errors_are_fields() -> None:
    sections, fields = [], []
    for module in MODULES:
        for line, text in docstrings(module):
            if SECTION.search(text) is not None:
                sections.append(f"{module}:{line}")
            fields += [
                f"{module}:{line}: :{k}{rest}" for k, rest in FIELD.findall(text) if not GOOD_FIELD.match(k + rest)
            ]
    assert sections == [], "write :param x:, :returns:, :raises X:"
    assert fields == []


def test_strings_describe_nothing_but_what_they_are_in() -> None:
    """What is said of a constant or a field stands in a comment before it, or in its class's docstring."""
    idle = []
    for module in MODULES:
        for node in ast.walk(ast.parse((PACKAGE / module).read_text())):
            body = getattr(node, "body", None)
            for one in body[1:] if isinstance(body, list) else ():
                is_string = isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)
                if is_string and isinstance(one.value.value, str):
                    idle.append(f"{module}:{one.lineno}")
    assert idle == [], "a string that does nothing"
