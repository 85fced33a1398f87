"""Records that peers leave for each other in a real DHT: read, written, withdrawn, forged, and a DHT without answer."""

from __future__ import annotations

import os
import re
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.utils import get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

from hivenb.engine.network.dht import DHT
from hivenb.engine.network.record_board import ANSWER_TIMEOUT, RECORD_BYTES, RecordBoard, is_owned, length_of, owner_of
from hivenb.errors import SwarmError

NO_ANSWER = r"the DHT did not answer within 0\.5 s; is its process overloaded or gone\?"


def values(board: RecordBoard) -> dict[Any, Any]:
    return {subkey: record.value for subkey, record in board.read().items()}


@contextmanager
def standing_still(dht: DHT) -> Iterator[None]:
    """The process of a DHT answers nobody meanwhile."""
    assert dht.pid is not None
    os.kill(dht.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(dht.pid, signal.SIGCONT)


class TestReadingAndWriting:
    def test_what_one_writes_all_read_by_its_subkey(
        self, dht: DHT, joining_dht: DHT, run_id: str, eventually: Callable[..., None]
    ) -> None:
        there, here = RecordBoard(joining_dht, run_id), RecordBoard(dht, run_id)
        assert here.read() == {}
        there.write("a name", "text")
        there.write(0, [1, b"bytes"])
        there.write(there.owner, b"signed")
        expected = {"a name": "text", 0: [1, b"bytes"], there.owner: b"signed"}
        eventually(lambda: values(here) == expected)
        there.write("a name", "another")
        eventually(lambda: values(here)["a name"] == "another")
        assert RecordBoard(dht, f"{run_id}_another").read() == {}

    def test_a_record_counts_as_long_as_it_should(self, dht: DHT, run_id: str, eventually: Callable[..., None]) -> None:
        board = RecordBoard(dht, run_id, expiration=30.0)
        earliest = get_dht_time() + 30.0
        board.write("a", 1)
        latest = get_dht_time() + 30.0
        eventually(board.read)
        assert earliest <= board.read()["a"].expiration_time <= latest
        short = RecordBoard(dht, f"{run_id}_short", expiration=0.5)
        short.write("a", 1)
        eventually(lambda: not short.read(), 5)

    def test_what_was_withdrawn_is_nothing(
        self, dht: DHT, joining_dht: DHT, run_id: str, eventually: Callable[..., None]
    ) -> None:
        there, here = RecordBoard(joining_dht, run_id), RecordBoard(dht, run_id)
        for subkey in (there.owner, "free"):
            there.write(subkey, b"here")
        eventually(lambda: values(here) == {there.owner: b"here", "free": b"here"})
        there.withdraw(there.owner, 10.0)
        assert values(there) == {there.owner: None, "free": b"here"}, "known here once it returns"
        eventually(lambda: values(here) == {there.owner: None, "free": b"here"})

    @pytest.mark.parametrize("value", ["text", 7, {"no": "board"}, [1, 2]])
    def test_a_value_that_is_no_board_is_an_empty_one(self, dht: DHT, run_id: str, value: Any) -> None:
        assert dht.store(run_id, value, expiration_time=get_dht_time() + 60)
        assert RecordBoard(dht, run_id).read() == {}


class TestLength:
    def test_a_record_that_is_too_long_is_refused_with_its_length(
        self, dht: DHT, run_id: str, eventually: Callable[..., None]
    ) -> None:
        board = RecordBoard(dht, run_id)
        with pytest.raises(SwarmError, match=rf"'{re.escape(run_id)}' takes 2049 bytes, and 2048 can travel: write"):
            board.write("long", b"x" * (RECORD_BYTES + 1))
        with pytest.raises(SwarmError, match=r"takes \d{4} bytes"):
            board.write("long", ["x" * 1000, "y" * 1100])
        board.write("just", b"x" * RECORD_BYTES)
        eventually(lambda: values(board) == {"just": b"x" * RECORD_BYTES})

    def test_what_a_value_takes(self) -> None:
        assert length_of(b"abc") == 3
        assert length_of("ä") == 3, "two letters of UTF-8, and how many there are"
        assert length_of([1, b"x" * 100]) == 104

    def test_the_longest_travels_in_one_piece(self, dht: DHT, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
        sent: list[int] = []
        pipe = dht._outer_pipe._connection
        send = pipe._send_bytes
        monkeypatch.setattr(pipe, "_send_bytes", lambda buffer: (sent.append(4 + len(buffer)), send(buffer)))
        board = RecordBoard(dht, f"{run_id}_{'a long name ' * 10}_options")
        board.write(board.owner, b"x" * RECORD_BYTES)
        assert len(sent) == 1
        assert RECORD_BYTES < sent[0] <= select.PIPE_BUF


class TestNoAnswer:
    def test_it_is_an_error_that_says_how_long_was_waited(self, joining_dht: DHT, run_id: str) -> None:
        board = RecordBoard(joining_dht, run_id, timeout=0.5)
        with standing_still(joining_dht):
            began = time.monotonic()
            with pytest.raises(SwarmError, match=NO_ANSWER):
                board.read()
            assert 0.4 < time.monotonic() - began < ANSWER_TIMEOUT / 2
        assert board.read() == {}, "and it can be asked again"

    def test_neither_writing_nor_withdrawing_waits_for_one(
        self, joining_dht: DHT, run_id: str, eventually: Callable[..., None]
    ) -> None:
        board = RecordBoard(joining_dht, run_id)
        with standing_still(joining_dht):
            began = time.monotonic()
            board.write("a", 1)
            board.write("b", 2)
            board.withdraw("a", 0.2)
            assert time.monotonic() - began < ANSWER_TIMEOUT / 2
        eventually(lambda: values(board) == {"a": None, "b": 2})

    def test_from_a_dht_that_was_closed_nothing_has_to_be_withdrawn(self, run_id: str, third_dht: DHT) -> None:
        board = RecordBoard(third_dht, run_id)
        third_dht.shutdown()
        board.withdraw("a", 0.2)
        for use in (board.read, lambda: board.write("a", 1)):
            with pytest.raises(OSError, match="closed"):
                use()


class TestOwners:
    def test_only_the_owner_of_a_signed_subkey_can_write_there(
        self, dht: DHT, joining_dht: DHT, run_id: str, eventually: Callable[..., None]
    ) -> None:
        own, foreign = RecordBoard(dht, run_id), RecordBoard(joining_dht, run_id, expiration=300.0)
        assert own.owner != foreign.owner
        own.write(own.owner, "mine")
        own.write("free", "mine")
        eventually(lambda: values(foreign) == {own.owner: "mine", "free": "mine"})
        foreign.write(own.owner, "forged")
        foreign.withdraw(own.owner, 10.0)
        for subkey in (own.owner, owner_of(RSAPrivateKey())):
            assert not joining_dht.store(run_id, "forged", expiration_time=get_dht_time() + 300, subkey=subkey)
        foreign.write("free", "theirs")
        eventually(lambda: values(own)["free"] == "theirs")
        for board in (own, foreign):
            assert values(board) == {own.owner: "mine", "free": "theirs"}

    def test_what_is_owned(self) -> None:
        key = RSAPrivateKey()
        owner = owner_of(key)
        assert is_owned(owner)
        assert owner == owner_of(key) == RSASignatureValidator(key).local_public_key
        assert owner != owner_of(RSAPrivateKey())
        for subkey in ("text", 7, None, b"", b"anywhere", owner + b"x", b"x" + owner, owner + owner, b"[owner:]x"):
            assert not is_owned(subkey)
