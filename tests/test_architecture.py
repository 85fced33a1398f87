"""The packages of hivenb: imports run one way, from a layer to those below it, and never in a circle."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import hivenb

PACKAGE = Path(hivenb.__file__).parent

#: Where the order of packages is written down.
MAP = PACKAGE / "ARCHITECTURE.md"


def layers() -> dict[str, int]:
    """The layer of each package, by its name within the package. Without a package of its own, a module or package is
    of the package that holds it."""
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", MAP.read_text(), flags=re.MULTILINE)
    found = {package: int(number) for number, packages in rows for package in re.findall(r"`([\w.]+)`", packages)}
    found[""] = found.pop("hivenb")
    return found


LAYER_OF = layers()


@cache
def modules() -> dict[str, Path]:
    """Each module of the package by its name within it; a package is named like the module that it is."""
    return {name_of(path): path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts}


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(module: str) -> str:
    parts = module.split(".")
    return next(package for n in range(len(parts), -1, -1) if (package := ".".join(parts[:n])) in LAYER_OF)


@cache
def imports_of(module: str) -> frozenset[str]:
    """Modules of the package that a module imports anywhere, for its types alone or not."""
    found = set()
    for node in ast.walk(ast.parse(modules()[module].read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {known for name in names if (known := nearest(name)) is not None}
    return frozenset(found - {module})


def nearest(name: str) -> str | None:
    """The module that an imported name is, or is in; ``None`` if it is of another package."""
    if name != "hivenb" and not name.startswith("hivenb."):
        return None
    inside = name.removeprefix("hivenb").removeprefix(".")
    while inside not in modules():
        inside = inside.rpartition(".")[0]
    return inside


def test_imports_run_down() -> None:
    up = [
        f"{module} (package {own or 'hivenb'}) imports {other} (package {theirs or 'hivenb'}), which is not below it"
        for module in modules()
        if not is_face(module)
        for other in imports_of(module)
        if (theirs := package_of(other)) != (own := package_of(module)) and LAYER_OF[theirs] >= LAYER_OF[own]
    ]
    assert up == []


def is_face(module: str) -> bool:
    """Whether it only says where the names of a package live; those who use a face know what is behind it."""
    return modules()[module].name == "__init__.py"


def test_there_is_no_circle() -> None:
    standing: list[str] = []
    done: set[str] = set()

    def visit(module: str) -> None:
        if module in done:
            return
        assert module not in standing, " -> ".join([*standing[standing.index(module) :], module])
        standing.append(module)
        for other in sorted(imports_of(module)):
            visit(other)
        done.add(standing.pop())

    for module in modules():
        visit(module)


def test_every_package_is_there() -> None:
    assert {package for package in LAYER_OF if package not in modules()} == set()


def test_only_the_view_displays() -> None:
    displays = {"IPython", "ipywidgets", "matplotlib", "traitlets"}
    named = {name for name in modules() if package_of(name) != "view" and not displays.isdisjoint(packages_of(name))}
    assert named == set()


def packages_of(module: str) -> set[str]:
    """The first parts of all that a module imports."""
    tree = ast.parse(modules()[module].read_text())
    found = {
        alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    return found | {(node.module or "").split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
