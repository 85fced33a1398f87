"""A clock that has become another one than those of the others is noticed and said, once; real nodes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hivemind.dht import DHTNode
from hivemind.dht import protocol as upstream
from tiny import LOOPBACK

from hivenb.engine.network import clock as module
from hivenb.engine.network.clock import MOST_APART, ClockStatus, compare_clocks
from hivenb.engine.network.dht import DHT


async def _set_clock(seconds: float, dht: Any, node: Any) -> None:
    upstream.get_dht_time = lambda: time.time() + seconds  # in its own process


@pytest.mark.process
def test_one_that_is_behind_is_told_once_and_again_when_it_was_right_in_between(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, eventually: Callable[..., None]
) -> None:
    other = DHT(start=True, **LOOPBACK)
    monkeypatch.setattr(module, "COMPARE_EVERY", 0.2)
    own = DHT(start=True, initial_peers=[str(a) for a in other.get_visible_maddrs()], **LOOPBACK)

    def told() -> list[str]:
        return [one.getMessage() for one in caplog.records if "The clock of this machine" in one.getMessage()]

    try:
        assert own.clock_trouble is None
        other.run_coroutine(partial(_set_clock, 1800.0))
        eventually(lambda: len(told()) == 1)
        assert "is 1,800 s behind those of the other peers" in (own.clock_trouble or "")
        other.run_coroutine(partial(_set_clock, 0.0))
        eventually(lambda: own.clock_trouble is None and not own._told_of_clock)
        assert len(told()) == 1
        other.run_coroutine(partial(_set_clock, -60.0))
        eventually(lambda: len(told()) == 2)
        assert "60 s ahead of those" in told()[1]
        assert {one.levelno for one in caplog.records} == {logging.WARNING}
    finally:
        own.shutdown()
        other.shutdown()


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([1000.0], 1000.0),
        ([0.0, 1e9, 0.2], 0.2),  # one that says what it likes
        ([None, None, 30.0], 30.0),
        ([0.1, 20.0], 0.1),  # either may be wrong
        ([None], 0.0),
        ([], 0.0),
    ],
)
def test_what_most_say_counts(monkeypatch: pytest.MonkeyPatch, said: list[float | None], expected: float) -> None:
    answers = iter(said)

    async def seconds_ahead(peer: Any, node: Any) -> float | None:
        return next(answers)

    async def sleep(seconds: float) -> None:
        if next(turns, None) is None:
            raise asyncio.CancelledError

    turns = iter([True])
    monkeypatch.setattr(module, "_seconds_ahead", seconds_ahead)
    monkeypatch.setattr(module.asyncio, "sleep", sleep)
    peers = dict.fromkeys(range(len(said)))
    node = SimpleNamespace(protocol=SimpleNamespace(routing_table=SimpleNamespace(peer_id_to_uid=peers)))
    status = ClockStatus()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(compare_clocks(cast(DHTNode, node), status))
    assert status._behind.value == expected
    assert (status.trouble is None) is (abs(expected) <= MOST_APART)
