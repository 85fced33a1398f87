"""How long an answer is waited for, by how long the last ones took."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

import pytest
from hivemind.dht import DHTNode
from hivemind.p2p import PeerID

from hivenb.engine.network.dht import DHT
from hivenb.engine.network.node import LONGEST, MOST_KNOWN, TIMES_AS_LONG, AdaptiveTimeouts, AdaptiveTimeoutStub

PEER, OTHER = (PeerID(b"\x12\x20" + bytes([number] * 32)) for number in (1, 2))


class Answers:
    """Of a peer, each after some seconds, or never; what time they were given is noted.

    :param seconds: until each of them
    """

    def __init__(self, clock: list[float], *seconds: float | None):
        self._clock, self._seconds = clock, iter(seconds)
        self.given: list[float] = []

    async def rpc_ping(self, request: Any, timeout: float) -> Any:
        return await self.rpc_find(request, timeout)

    async def rpc_find(self, request: Any, timeout: float) -> Any:
        self.given.append(timeout)
        seconds = next(self._seconds)
        if seconds is None or seconds > timeout:
            self._clock[0] += timeout
            raise asyncio.TimeoutError
        self._clock[0] += seconds
        return request


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def ask(
    answers: Answers, timeouts: AdaptiveTimeouts, name: str = "rpc_find", count: int = 1, peer: PeerID = PEER
) -> list[Any]:
    call = getattr(AdaptiveTimeoutStub(answers, peer, timeouts), name)
    return [asyncio.run(_outcome(call)) for _ in range(count)]


async def _outcome(call: Any) -> Any:
    try:
        return await call("found", timeout=3.0)
    except asyncio.TimeoutError:
        return None


def test_whoever_answers_at_once_is_given_no_more_time(clock: list[float]) -> None:
    answers = Answers(clock, *[0.1] * 5, None)
    assert ask(answers, AdaptiveTimeouts(), count=6) == ["found"] * 5 + [None]
    assert answers.given[0] == 3.0
    assert max(answers.given) == pytest.approx(3.0 + TIMES_AS_LONG * 0.1)


def test_a_line_that_fills_up_is_waited_for_longer_and_longer_until_it_is_empty(clock: list[float]) -> None:
    answers = Answers(clock, 1.0, 2.5, 4.5, 6.5, *[0.1] * 30)
    assert ask(answers, AdaptiveTimeouts(), count=34) == ["found"] * 34
    assert answers.given[4] == pytest.approx(3.0 + LONGEST)
    assert answers.given[-1] < 3.5


def test_whoever_was_waited_for_in_vain_has_more_time_to_be_found_again(clock: list[float]) -> None:
    answers, timeouts = Answers(clock, 5.0, 5.0, 5.0), AdaptiveTimeouts()
    assert ask(answers, timeouts, "rpc_find") == [None]
    assert ask(answers, timeouts, "rpc_ping") == ["found"]
    assert ask(answers, timeouts, "rpc_find") == ["found"]
    assert answers.given == [3.0, 6.0, pytest.approx(3.0 + TIMES_AS_LONG * 5.0)]


def test_nobody_waits_longer_for_one_that_has_fallen_silent(clock: list[float]) -> None:
    timeouts, answers = AdaptiveTimeouts(), Answers(clock, 0.5, *[None] * 19)
    ask(answers, timeouts, count=10)
    assert max(answers.given) == pytest.approx(3.0 + TIMES_AS_LONG * 0.5)
    ask(answers, timeouts, "rpc_ping", count=10)
    assert max(answers.given) == 3.0 + LONGEST, "but for what is to find it again"
    assert timeouts.beyond(OTHER) == timeouts.to_find_again(OTHER) == 0.0


def test_what_is_known_of_peers_has_an_end(clock: list[float]) -> None:
    timeouts = AdaptiveTimeouts()
    for number in range(MOST_KNOWN + 9):
        ask(Answers(clock, 1.0), timeouts, peer=PeerID(b"\x12\x20" + number.to_bytes(32, "big")))
    assert len(timeouts._longest) == MOST_KNOWN


async def _dawdle(dht: Any, node: DHTNode, seconds: float) -> None:
    protocol: Any = node.protocol

    async def slow(request: Any, context: Any) -> Any:
        await asyncio.sleep(seconds)
        return await type(protocol).rpc_find(protocol, request, context)

    await node.protocol.remove_p2p_handlers(node.p2p)
    protocol.rpc_find = slow
    await node.protocol.add_p2p_handlers(node.p2p)


async def _knows(dht: Any, node: DHTNode, peer: PeerID) -> bool:
    return peer in node.protocol.routing_table.peer_id_to_uid


@pytest.mark.process
@pytest.mark.timeout(120)
def test_a_peer_whose_line_is_full_is_not_struck_off(dht: DHT, joining_dht: DHT) -> None:
    known = partial(_knows, peer=dht.peer_id)
    for seconds in (1.5, 4.0):
        dht.run_coroutine(partial(_dawdle, seconds=seconds), return_future=True).result(30)
        joining_dht.get("key", latest=True, return_future=True).result(30)
        assert joining_dht.run_coroutine(known, return_future=True).result(30)
