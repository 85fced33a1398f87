"""What a class of hivenb may be: two bases at most, one of them ours; no attribute that nobody declares; one override.

The last rule has a list of methods that two classes of ours override, and why they may. One that holds the rule by now
has to be taken off the list.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import pkgutil
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from typing import Any, Generic, Protocol

import pytest

import hivenb

#: What runs when it is imported.
PROGRAMS = ("hivenb.__main__", "hivenb.engine.process._exec_tied")

#: Whose methods are overridden once.
UPSTREAM = ("hivemind", "lightning", "pytorch_lightning", "torch")

_CALLS_THE_OTHER = "hivemind has it in two classes, of which the first calls the second; ours have one for each"

#: Methods of a library that two classes of ours override, by classes of ours, and why they may.
OVERRIDDEN_TWICE: dict[str, dict[str, str]] = {
    "engine.averaging.gradient_averager.GradientAverager": {"step": _CALLS_THE_OTHER},
    "engine.averaging.gradient_averager.PowerSGDGradientAverager": {"step": _CALLS_THE_OTHER},
    "engine.averaging.state_averager.TrainingStateAverager": {
        "step": _CALLS_THE_OTHER,
        "load_state_from_peers": _CALLS_THE_OTHER,
    },
}


@cache
def classes() -> dict[str, type]:
    """All that stand in a module of hivenb, or in a class there, by their names within the package."""
    found: dict[str, type] = {}

    def note(owner: Any, module: str) -> None:
        for value in list(vars(owner).values()):
            if isinstance(value, type) and value.__module__ == module:
                name = f"{module.removeprefix('hivenb.')}.{value.__qualname__}"
                if name not in found:
                    found[name] = value
                    note(value, module)

    for one in pkgutil.walk_packages(hivenb.__path__, "hivenb."):
        if one.name not in PROGRAMS:
            note(import_module(one.name), one.name)
    return found


def is_ours(one: type) -> bool:
    return one.__module__.partition(".")[0] == "hivenb"


def is_protocol(one: type) -> bool:
    return bool(getattr(one, "_is_protocol", False))


# -- bases -----------------------------------------------------------------------------------------------------------


def has_too_many_bases(one: type) -> bool:
    """Exceptions, enumerations and protocols aside, which are for their kind."""
    if issubclass(one, BaseException):
        return False
    counted = [
        base
        for base in one.__bases__
        if base not in (object, Protocol, Generic) and not is_protocol(base) and not issubclass(base, enum.Enum)
    ]
    return len(counted) > 2 or sum(map(is_ours, counted)) > 1


# -- attributes ------------------------------------------------------------------------------------------------------


def undeclared(one: type) -> frozenset[str]:
    """What a class reads of ``self`` that neither it nor a base of it defines.

    A bare annotation defines nothing, nor does what stands under ``if TYPE_CHECKING:``; a field of a dataclass does.
    """
    if is_protocol(one) or any("__getattr__" in vars(base) for base in one.__mro__ if is_ours(base)):
        return frozenset()
    defined: set[str] = set()
    for base in one.__mro__:
        defined |= definitions(base)
    return frozenset(name for name in uses(one)[0] - defined if not (name.startswith("__") and name.endswith("__")))


@cache
def definitions(base: type) -> frozenset[str]:
    """Attributes that a class itself defines, or its methods assign."""
    defined = set(vars(base)) | uses(base)[1]
    if dataclasses.is_dataclass(base):
        defined |= {field.name for field in dataclasses.fields(base)}
    defined |= set(getattr(base, "_fields", ()))
    return frozenset(defined)


@cache
def uses(one: type) -> tuple[frozenset[str], frozenset[str]]:
    """Attributes of ``self`` that the methods of a class read, and those that they assign."""
    read: set[str] = set()
    assigned: set[str] = set()
    for method, itself in methods(one):
        bare = {id(node.target) for node in ast.walk(method) if isinstance(node, ast.AnnAssign) and node.value is None}
        for node in ast.walk(method):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == itself:
                if isinstance(node.ctx, ast.Load):
                    read.add(node.attr)
                elif isinstance(node.ctx, ast.Store) and id(node) not in bare:
                    assigned.add(node.attr)
            elif isinstance(node, ast.Call) and (name := set_by_name(node, itself)) is not None:
                assigned.add(name)
    return frozenset(read), frozenset(assigned)


def set_by_name(call: ast.Call, itself: str) -> str | None:
    """The attribute that ``setattr(self, "name", ...)`` or ``object.__setattr__`` assigns."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name not in ("setattr", "__setattr__") or len(call.args) != 3:
        return None
    given, attribute, _ = call.args
    is_own = isinstance(given, ast.Name) and given.id == itself
    return str(attribute.value) if is_own and isinstance(attribute, ast.Constant) else None


def methods(one: type) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    """Methods in the source of a class, and what each calls the object; none of a class that is not of Python's."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(one)))
    except (OSError, TypeError, SyntaxError):
        return
    (definition,) = tree.body
    for node in getattr(definition, "body", ()):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            kinds = {getattr(decorator, "id", "") for decorator in node.decorator_list}
            arguments = [*node.args.posonlyargs, *node.args.args]
            if "classmethod" in kinds:
                yield node, "self"  # as hivemind calls there what it has just made
            elif arguments and "staticmethod" not in kinds:
                yield node, arguments[0].arg


# -- overrides -------------------------------------------------------------------------------------------------------


def overridden_often(one: type) -> frozenset[str]:
    """Methods of a library that more than one class of ours overrides in a chain; ``__init__`` is each one's own."""
    theirs = {
        name
        for base in one.__mro__
        if base.__module__.partition(".")[0] in UPSTREAM
        for name, value in vars(base).items()
        if name != "__init__" and isinstance(value, METHODS)
    }
    ours = [base for base in one.__mro__ if is_ours(base) and not is_protocol(base)]
    return frozenset(name for name in theirs if sum(isinstance(vars(base).get(name), METHODS) for base in ours) > 1)


def overridden_too_often(one: type) -> frozenset[str]:
    """The same without those that may be."""
    name = f"{one.__module__.removeprefix('hivenb.')}.{one.__qualname__}"
    return overridden_often(one).difference(OVERRIDDEN_TWICE.get(name, ()))


METHODS = (type(lambda: None), staticmethod, classmethod, property)


# -- rules -----------------------------------------------------------------------------------------------------------

RULES: dict[str, Callable[[type], Any]] = {
    "two bases at most, one of them ours": has_too_many_bases,
    "what is read is declared": undeclared,
    "one override of a method": overridden_too_often,
}


@pytest.mark.parametrize("rule", RULES)
def test_classes_hold_the_rule(rule: str) -> None:
    assert len(classes()) > 300
    assert {name: broken for name, one in classes().items() if (broken := RULES[rule](one))} == {}


def test_what_may_be_overridden_twice_is() -> None:
    found = {name: overridden_often(classes()[name]) for name in OVERRIDDEN_TWICE}
    assert found == {name: set(methods) for name, methods in OVERRIDDEN_TWICE.items()}, "take off what is not"
