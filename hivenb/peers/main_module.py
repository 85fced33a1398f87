"""The module ``__main__``: processes forked from a server start without that of their parent, and get it on demand.

multiprocessing imports the main module of the parent anew in each process that it does not simply fork. A script that
is not guarded by ``if __name__ == "__main__":`` runs once more then. What a peer needs of it travels with its recipe,
by value; what refers to something in it by its name is the exception.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import sys
from collections.abc import Callable
from multiprocessing import popen_forkserver, spawn
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import cloudpickle

from hivenb.errors import LocalPeerError

_MAIN = ("init_main_from_name", "init_main_from_path")


def main_module() -> dict[str, str]:
    """How to import the main module of this process in another one; empty if that cannot be done, as in a notebook."""
    return {key: value for key, value in spawn.get_preparation_data("").items() if key in _MAIN}


class ProcessWithoutMain(mp.context.ForkServerProcess):
    """A process forked from a server, that does not import the main module of its parent."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _PopenWithoutMain(process_obj)


def _prepared_without_main(name: str) -> dict[str, Any]:
    return {key: value for key, value in spawn.get_preparation_data(name).items() if key not in _MAIN}


class _PopenWithoutMain(popen_forkserver.Popen):
    # Python's own, but for what it takes for ``spawn``, which is all that says whether to import the main module
    _launch: Callable[..., None] = FunctionType(
        vars(popen_forkserver.Popen)["_launch"].__code__,
        {**vars(popen_forkserver), "spawn": SimpleNamespace(get_preparation_data=_prepared_without_main)},
    )


def unpack(packed: bytes, main: dict[str, str]) -> Any:
    """Unpack what cloudpickle has packed in another process; its main module is imported only if it has to be.

    :param packed: what was packed
    :param main: what :func:`main_module` gave there
    :raises LocalPeerError: if it refers to the main module by name, which cannot be imported
    """
    sys.modules["__main__"] = ModuleType("__main__")  # not that of the server, which is multiprocessing's own
    try:
        return _loaded(packed)
    except AttributeError as e:
        if "__main__" not in str(e):
            raise
        missing = e
    try:
        _import(main)
        return _loaded(packed)
    except BaseException as e:
        where = next(iter(main.values()), "the notebook")
        raise LocalPeerError(
            f"the model or the data refer by name to something in {where} ({missing}), which cannot be imported in "
            f"another process ({type(e).__name__}: {e}). Put what they refer to into a module of its own, and in a "
            'script, put what starts the swarm under if __name__ == "__main__":'
        ) from e


def _loaded(packed: bytes) -> Any:
    """What was packed; classes and functions that came by value are found by their names from now on.

    Whoever pickles them again, without cloudpickle, needs that: Lightning drops hyperparameters that it cannot pickle.
    """
    loaded = cloudpickle.loads(packed)
    # not isinstance(), which looks at attributes, and so wakes what is there to be loaded later
    named = [thing for thing in gc.get_objects() if issubclass(type(thing), (type, FunctionType))]
    for thing in named:
        if thing.__module__ == "__main__" and thing.__qualname__.isidentifier():
            setattr(sys.modules["__main__"], thing.__qualname__, thing)
    return loaded


def _import(main: dict[str, str]) -> None:
    process: Any = mp.current_process()
    process._inheriting = True  # what multiprocessing knows this moment by, and refuses to start processes in it
    try:
        spawn.prepare(dict(main))
    finally:
        del process._inheriting
