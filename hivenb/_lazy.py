"""Faces of packages: public names that are imported from where they live when they are first used."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from hivenb._interrupts import interrupts_blocked
from hivenb._library_warnings import library_warnings_ignored
from hivenb.errors import PlatformError


def lazy_face(package: str, home_of: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` (PEP 562) of a package whose names live in other modules.

    :param package: its ``__name__``
    :param home_of: each public name, and the module that defines it
    """

    def get(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}; public names: {', '.join(sorted(home_of))}"
            )
        if home_of[name] not in sys.modules:
            require_working_directory()
        # not in the middle of torch, which cannot be imported again then, and which ends some processes that try to;
        # a program that ends with an interrupt (app/loading.py) does so at once
        raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with library_warnings_ignored(), interrupts_blocked() if raises else contextlib.nullcontext():
            value = getattr(import_module(home_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        # what Tab lists: no module that was loaded meanwhile, and nothing that this one has imported for itself
        own = vars(sys.modules[package])
        return sorted({*home_of, *own.get("__all__", ()), *(name for name in own if name.startswith("__"))})

    return get, names


def require_working_directory() -> None:
    """Stop with a clear sentence where the working directory was deleted: torch ends a process that imports it there.

    :raises PlatformError: if it is not there any more
    """
    try:
        os.getcwd()
    except OSError as e:
        raise PlatformError(
            "the working directory of this process has been deleted, and torch cannot be imported there. "
            "Go to another one, with %cd ~ in a notebook or os.chdir(...) in a script, and do this again"
        ) from e
