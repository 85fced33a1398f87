"""What the DHT's process is asked for: with functions and classes of cells, which it was forked too early to know.

hivemind pickles them by their names. Its process cannot read such a request, and drops it with the future in it: who
asked would wait for ever.
"""

from __future__ import annotations

import io
import pickle
from collections import ChainMap
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar

import cloudpickle
from hivemind.utils import MPFuture

from hivenb.engine.process.answered_pipe import AnsweredPipe
from hivenb.errors import SwarmError


class _Pickler(cloudpickle.Pickler):
    """Packs what the main module defines by value, and as multiprocessing does what processes share."""

    dispatch_table: ClassVar[Any] = ChainMap(ForkingPickler._extra_reducers, cloudpickle.Pickler.dispatch_table)  # type: ignore[attr-defined]


class RequestPipe(AnsweredPipe):
    """The way into the DHT's process, whose messages :func:`request_in` reads."""

    def send(self, message: tuple[str, Any, dict[str, Any]]) -> None:
        method, args, kwargs = message
        answers = {name: value for name, value in kwargs.items() if isinstance(value, MPFuture)}
        others = {name: value for name, value in kwargs.items() if name not in answers}
        super().send((method, [_packed((args, others))], answers))


def request_in(message: bytes) -> tuple[str, Any, dict[str, Any]]:
    """Name of the method that is asked for, and its arguments; if they cannot be unpacked, who waits is told.

    :raises Exception: whatever came of unpacking it
    """
    method, (packed,), answers = pickle.loads(message)
    try:
        args, kwargs = pickle.loads(packed)
    except Exception as e:
        for answer in answers.values():
            answer.set_exception(
                SwarmError(
                    f"the DHT's process could not unpack what it was asked for: {type(e).__name__}: {e}. It has the "
                    "modules and the sys.path that there were when the swarm was opened or joined: define it in a cell "
                    "or in the main script, or import its module before"
                )
            )
        raise
    return method, args, {**kwargs, **answers}


def _packed(arguments: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(arguments)
    return file.getvalue()
