"""A pipe that another thread closes while it is written to."""

from __future__ import annotations

import multiprocessing as mp
from multiprocessing.connection import Connection
from typing import Any

import pytest

from hivenb.engine.process.watched_child import AnsweredPipe


class ClosedAmidIt(Connection):
    """Is closed by another thread when :meth:`send` has just seen that it is open."""

    def _send_bytes(self, buf: Any) -> None:
        self.close()
        super()._send_bytes(buf)  # type: ignore[misc]


@pytest.fixture
def connection() -> Any:
    ours, theirs = mp.Pipe()
    made = ClosedAmidIt(ours.fileno())
    yield made
    theirs.close()
    ours._handle = None  # type: ignore[attr-defined]  # its descriptor is closed


def test_what_is_closed_amid_a_message_is_an_error_of_the_system(connection: Connection) -> None:
    with pytest.raises(OSError, match="closed"):
        AnsweredPipe(connection).send(("method", [], {}))


def test_a_message_that_cannot_be_pickled_is_what_it_is(connection: Connection) -> None:
    with pytest.raises(TypeError, match="pickle"):
        AnsweredPipe(connection).send(("method", [iter([]), (i for i in ())], {}))
    connection.close()
