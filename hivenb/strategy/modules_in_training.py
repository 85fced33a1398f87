"""Which modules are being trained at the moment, so that no two trainings share one."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol

from hivenb._fresh_locks import free_in_children
from hivenb.errors import TrainingError
from hivenb.options.options import Options


class Holder(Protocol):
    """A strategy, as far as it matters here."""

    options: Options


_holders: weakref.WeakValueDictionary[int, Holder] = weakref.WeakValueDictionary()
_lock = threading.Lock()
free_in_children(_lock)


def hold(module: Any, strategy: Holder) -> None:
    """Let a strategy have a module for itself until :func:`let_go`. Again has no effect.

    :param module: the LightningModule, with which nothing has been done yet
    :param strategy: which lives for as long as it has the module
    :raises TrainingError: if another strategy has it; the module is as it was, and the other one trains on
    """
    with _lock:
        holder = _holders.setdefault(id(module), strategy)
    if holder is not strategy:
        raise TrainingError(
            f"this {type(module).__name__} is being trained already, by the run {holder.options.run_id!r}, and two "
            "trainings of one module would spoil each other: train a copy, copy.deepcopy(model), or stop that run first"
        )


def let_go(strategy: Holder) -> None:
    """Let others have the module that a strategy had."""
    with _lock:
        for key in [key for key, holder in _holders.items() if holder is strategy]:
            del _holders[key]


def run_that_trains(module: Any) -> str | None:
    """Name of the run that trains a module with :class:`hivenb.HivemindStrategy` in this process, if one does."""
    with _lock:
        holder = _holders.get(id(module))
    return None if holder is None else holder.options.run_id
