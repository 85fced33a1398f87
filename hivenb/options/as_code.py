"""Writes options as Python: the plain Lightning script that does what the widgets show."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hivenb.compression import CODECS, codec_code, public_home
from hivenb.errors import OptionsError

_COMPRESSION = "hivenb.compression"


class NoTextError(Exception):
    """A value cannot be written as Python; the message says what it is."""


#: Python that makes a value, and the modules of the names to import for it.
Expression = tuple[dict[str, str], str]

#: Keyword arguments by name, each with what writes it as Python.
Arguments = Mapping[str, tuple[Any, Callable[[Any], Expression]]]

#: What data is called of which nothing else is known; and so a pair of it, for training and validation, will do.
_ANY = "data"
_WHATEVER_IT_IS = "*(data if isinstance(data, tuple) else (data,))"

#: Of the Trainer, unless something else is asked for.
_TRAINER = {"accelerator": "auto", "devices": 1}


def strategy_script(
    arguments: Arguments,
    *,
    model: str,
    data: str,
    trainer: Mapping[str, Any] | None = None,
    copies: bool = False,
) -> str:
    """A script that trains with `hivenb.HivemindStrategy`.

    :param arguments: the strategy's keyword arguments, each with what writes its value as Python
    :param model: the Python expression for the LightningModule
    :param data: the Python expression(s) for what follows it in ``trainer.fit``; empty if the model brings its data
    :param trainer: keyword arguments of the Trainer
    :param copies: whether to train a copy of the model, since something else is training it
    :returns: valid Python; an argument that has no text is a comment that asks for it
    """
    imports, lines = _arguments(arguments, {})
    imports, of_trainer = _arguments(
        {name: (value, expression) for name, value in (_TRAINER if trainer is None else trainer).items()}, imports
    )
    is_module, named = data.startswith("datamodule="), data.removeprefix("datamodule=").removeprefix("*")
    trained = f"copy.deepcopy({model})" if copies else model
    given = f"datamodule=copy.deepcopy({named})" if copies and is_module else data
    own = {name: home for name, home in imports.items() if home == _COMPRESSION}
    standard = {name: home for name, home in imports.items() if home.partition(".")[0] in sys.stdlib_module_names}
    others = {name: home for name, home in imports.items() if name not in own and name not in standard}
    return "\n".join(
        [
            *(["import copy"] if copies else []),
            *_import_lines(standard),
            *([""] if standard or copies else []),
            "import lightning",
            *_import_lines(others),
            "",
            "from hivenb import HivemindStrategy",
            *_import_lines(own),
            "",
            f"# `{model}` is your LightningModule{f', `{named}` your data' if named else ''}.",
            "# Open to all as it stands: initial_peers= an invite joins a private swarm, secret= starts one.",
            "strategy = HivemindStrategy(",
            *lines,
            ")",
            *_trainer_lines(of_trainer),
            *(["# A copy of the model, since a run is training it."] if copies else []),
            f"trainer.fit({', '.join(filter(None, (trained, _WHATEVER_IT_IS if given == _ANY else given)))})",
            "",
        ]
    )


def _arguments(arguments: Arguments, imports: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """Keyword arguments, each on a line of its own, and the names to import for them and what came before."""
    lines = []
    for name, (value, write) in arguments.items():
        try:
            needed, text = write(value)
            if type(value) is str and text == f"'{value}'" and '"' not in value:
                text = f'"{value}"'  # as the rest of the script
            imports = _together(imports, needed)
        except NoTextError as reason:
            lines.append(f"    # {name}: {reason} goes here")
            continue
        lines.append(f"    {name}={text},")
    return imports, lines


def _trainer_lines(arguments: Sequence[str]) -> list[str]:
    """The making of the Trainer: on one line if it is short."""
    short = ", ".join(line.strip().removesuffix(",") for line in ("strategy=strategy", *arguments))
    if "#" not in short and len(short) <= 80:
        return [f"trainer = lightning.Trainer({short})"]
    return ["trainer = lightning.Trainer(", "    strategy=strategy,", *arguments, ")"]


def codec_expression(value: Any) -> Expression:
    """Python that makes a codec, and the modules of the names to import for it."""
    try:
        names, text = codec_code(value)
    except OptionsError as error:
        raise NoTextError(f"a codec of your own ({type(value).__qualname__})") from error
    return dict.fromkeys(names, _COMPRESSION), text


def expression(value: Any) -> Expression:
    """Python that makes a value, and the modules of the names to import for it.

    :raises NoTextError: when there is none
    """
    imports: dict[str, str] = {}

    def inner(part: Any) -> str:
        needed, text = expression(part)
        imports.update(_together(imports, needed))
        return text

    if isinstance(value, float) and not math.isfinite(value):
        return imports, f'float("{value}")'
    if value is None or type(value) in (bool, int, float, str, bytes):
        return imports, repr(value)
    if type(value) is list:
        return imports, f"[{', '.join(map(inner, value))}]"
    if type(value) is tuple:
        return imports, f"({', '.join(map(inner, value))}{',' if len(value) == 1 else ''})"
    if type(value) is dict:
        return imports, "{" + ", ".join(f"{inner(key)}: {inner(part)}" for key, part in value.items()) + "}"
    if isinstance(value, functools.partial):
        arguments = [inner(value.func), *map(inner, value.args)]
        arguments += [f"{name}={inner(part)}" for name, part in value.keywords.items()]
        return _together(imports, {"partial": "functools"}), f"partial({', '.join(arguments)})"
    return _imported(value)


def describe(value: Any) -> str:
    """A short text for a value, the same in every process: code where there is any, else what it is."""
    try:
        if isinstance(value, str) and value in CODECS:
            return repr(value)
        if not isinstance(value, (str, type)) and hasattr(value, "estimate_compression_ratio"):
            return codec_expression(value)[1]
        return expression(value)[1]
    except NoTextError as reason:
        return f"<{reason}>"


def _imported(value: Any) -> Expression:
    """A class or function by the name it has in its module."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        raise NoTextError(f"an object of your own ({type(value).__qualname__})")
    first = name.partition(".")[0]
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if module == "__main__" or found is not value:
        raise NoTextError(f"your own {name if name.isidentifier() else 'function'}")
    if module == "builtins":
        return {}, name
    return {first: _COMPRESSION if public_home(first) == module else module}, name


def _together(imports: Mapping[str, str], needed: Mapping[str, str]) -> dict[str, str]:
    for name, home in needed.items():
        if imports.get(name, home) != home:
            raise NoTextError(f"{home}.{name}, not {imports[name]}.{name},")
    return {**imports, **needed}


def _import_lines(imports: Mapping[str, str]) -> list[str]:
    homes = sorted(set(imports.values()))
    return [f"from {home} import {', '.join(sorted(n for n, h in imports.items() if h == home))}" for home in homes]
