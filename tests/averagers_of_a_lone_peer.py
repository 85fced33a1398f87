"""Averagers without processes, for a peer that is alone in its run: there is nothing that they could be asked there.

All else is as it is for people: the DHT, the tracker that reads who is there, the optimizer, and its steps in the
background. Two processes to start and end take most of the time of a short training.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hivenb.engine.averaging.averager import Averager


class _Pipe:
    """In place of the one to a process: hears what is told, and fails whoever wants to meet somebody.

    :param averager: to which it leads
    """

    ended = None

    def __init__(self, averager: Averager):
        self._averager = weakref.ref(averager)

    def send(self, message: tuple[str, Any, dict[str, Any]]) -> None:
        method, _, answers = message
        if method == "_shutdown":
            vars(self._averager())["_is_there"] = False
        elif method == "_set_live":
            answers["done"].set_result(None)
        elif answers:
            raise AssertionError(f"{method} of an averager that has no process: this peer is not alone")


def _start(averager: Any) -> None:
    averager._outer_pipe = _Pipe(averager)
    averager._is_there = True
    averager._ready.set_result(None)


@contextmanager
def without_averager_processes() -> Iterator[None]:
    """Averagers that are made meanwhile start none, and look alive all the same until they are shut down."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Averager, "start", _start)
        patch.setattr(Averager, "is_alive", lambda averager: getattr(averager, "_is_there", False))
        patch.setattr(Averager, "join", lambda averager, timeout=None: None)
        yield
