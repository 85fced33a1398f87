"""A pipe that other threads close, or write to, while one writes to it."""

from __future__ import annotations

import multiprocessing as mp
import threading
from multiprocessing.connection import Connection
from typing import Any

import pytest

from hivenb.engine.process.watched_child import AnsweredPipe

#: Bytes from which on multiprocessing writes a message in two parts.
LONG = 16 * 1024


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


def test_long_messages_of_several_threads_do_not_mix() -> None:
    out, into = mp.Pipe(duplex=False)
    pipe, each = AnsweredPipe(into), 100

    def send(number: int) -> None:
        for _ in range(each):
            pipe.send((str(number), bytes([number]) * (LONG + 1000 * number), {}))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    found: list[Any] = [out.recv() for _ in range(each * len(threads))]
    for thread in threads:
        thread.join()
    assert sorted(name for name, *_ in found) == sorted(str(number) for number in range(4) for _ in range(each))
    assert all(data == bytes([int(name)]) * (LONG + 1000 * int(name)) for name, data, _ in found)
    pipe.close()
    out.close()
