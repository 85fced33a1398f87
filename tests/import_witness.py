"""Says as JSON what hivenb changes of other libraries and of the whole process. To be run in a process of its own.

What the import of all its modules changes, and what an open swarm does then.
"""

from __future__ import annotations

import json
import logging
import multiprocessing.heap
import multiprocessing.managers
import multiprocessing.popen_forkserver
import multiprocessing.sharedctypes
import os
import pkgutil
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

import hivemind
import lightning.pytorch  # noqa: F401 - which is watched
import torch.multiprocessing

#: Packages whose modules and classes stay as they are.
WATCHED = (
    "asyncio",
    "concurrent",
    "copyreg",
    "hivemind",
    "lightning",
    "logging",
    "msgpack",
    "multiprocessing",
    "pickle",
    "signal",
    "threading",
    "torch",
    "warnings",
)

#: What is a program, and runs when it is imported.
PROGRAMS = ("hivenb.__main__", "hivenb.engine.process._exec_tied")

#: What Python, or the metaclass of an abstract class, notes for itself.
_NOTES = frozenset({"__warningregistry__", "__annotations__", "__dict__", "__weakref__", "_abc_impl", "__slotnames__"})

#: What holds what changes from moment to moment, whoever is at work.
_ALIVE = frozenset(
    {
        "asyncio.coroutines._iscoroutine_typecache",
        "logging._handlerList",
        "multiprocessing.process._children",
        "multiprocessing.util._finalizer_registry",
        "threading._active",
        "torch.multiprocessing.reductions.shared_cache",
    }
)

_MISSING = object()


def is_watched(name: str) -> bool:
    return name.split(".")[0] in WATCHED


def owners() -> Iterator[tuple[str, Any]]:
    """Each loaded module of others, and each class in it that is theirs, by their names."""
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and is_watched(name):
            yield name, module
            for value in list(vars(module).values()):
                if issubclass(type(value), type) and is_watched(str(getattr(value, "__module__", ""))):
                    yield f"{value.__module__}.{value.__qualname__}", value


def attributes() -> dict[tuple[str, str], Any]:
    """What stands where."""
    return {
        (name, attribute): value
        for name, owner in owners()
        for attribute, value in list(vars(owner).items())
        if attribute not in _NOTES
    }


def tables(known: Mapping[tuple[str, str], Any]) -> dict[tuple[str, str], list[tuple[str, Any]]]:
    """What is in the tables, lists and sets among them."""
    return {where: contents(value) for where, value in known.items() if isinstance(value, (dict, list, set))}


def contents(table: Any) -> list[tuple[str, Any]]:
    if isinstance(table, dict):
        return [(repr(key)[:80], value) for key, value in table.items()]
    return [(repr(value)[:80] if isinstance(value, (str, int)) else "", value) for value in list(table)]


def settings() -> dict[str, Any]:
    """What holds for the whole process."""
    state: dict[str, Any] = {
        "warnings.filters": list(warnings.filters),
        "warnings.showwarning": warnings.showwarning,
        "environment": dict(os.environ),
        "environment of C": sorted(os.popen("env").read().splitlines()),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "threads of torch": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "sharing strategy of torch": torch.multiprocessing.get_sharing_strategy(),
        "default dtype of torch": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "random numbers": torch.random.get_rng_state().tolist(),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "standard streams": (sys.stdin, sys.stdout, sys.stderr),
        "hooks": (sys.excepthook, sys.unraisablehook, threading.excepthook, sys.displayhook),
        "import path": list(sys.path),
        "import hooks": (list(sys.meta_path), list(sys.path_hooks)),
        "working directory": os.getcwd(),
        "recursion limit": sys.getrecursionlimit(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
    }
    for name, one in {"": logging.root, **logging.Logger.manager.loggerDict}.items():
        if isinstance(one, logging.Logger) and name.partition(".")[0] != "hivenb":
            state[f"logger {name}"] = (one.level, list(one.handlers), list(one.filters), one.propagate, one.disabled)
    return state


class Snapshot:
    """All of it at one moment."""

    def __init__(self) -> None:
        self.attributes, self.settings = attributes(), settings()
        self.tables = tables(self.attributes)

    def changes(self, now: Snapshot) -> Iterator[tuple[str, str]]:
        """What is otherwise now, of what there was before: where, and what."""
        there = {name for name, _ in self.attributes}
        for where in self.attributes.keys() | now.attributes.keys():
            old, new = self.attributes.get(where, _MISSING), now.attributes.get(where, _MISSING)
            is_submodule = isinstance(new, ModuleType) and new.__name__ == ".".join(where)
            if where[0] in there and old is not new and not is_submodule:
                yield ".".join(where), f"{old!r:.100} -> {new!r:.100}"
        for where, before in self.tables.items():
            after = now.tables.get(where, before)
            same = len(before) == len(after) and all(a[1] is b[1] for a, b in zip(before, after, strict=True))
            if not same and ".".join(where) not in _ALIVE:
                more = [key for key, value in after if not any(value is known for _, known in before)]
                less = [key for key, value in before if not any(value is known for _, known in after)]
                yield ".".join(where), f"has no more {less}, and has {more}"
        for name, setting in self.settings.items():
            if now.settings.get(name) != setting:
                yield name, f"{setting!r:.300} -> {now.settings.get(name)!r:.300}"


def load_all() -> None:
    import hivenb

    for one in pkgutil.walk_packages(hivenb.__path__, "hivenb."):
        if one.name not in PROGRAMS:
            import_module(one.name)


def main() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of modules of theirs that are about to go, as they are loaded and looked at
        for one in pkgutil.walk_packages(hivemind.__path__, "hivemind."):
            if "hivemind_cli" not in one.name:
                import_module(one.name)
        list(owners())
    before = Snapshot()
    load_all()
    loaded = Snapshot()
    by_import = dict(before.changes(loaded))
    import hivenb

    with hivenb.Swarm():
        by_swarm = dict(loaded.changes(Snapshot()))
    told = {"looked at": len(before.attributes), "by import": by_import, "by swarm": by_swarm}
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main()
