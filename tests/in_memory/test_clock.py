"""The loop whose time jumps, what waits for it in threads, and lines that are cut or break."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time

import pytest
from hivemind.p2p import P2PDaemonError
from hivemind.utils import get_dht_time

from hivenb.engine.matchmaking import matchmaking
from in_memory.clock import Answer, StandstillError, VirtualLoop
from in_memory.network import DIAL_TIMEOUT
from in_memory.swarm import InMemorySwarm


async def test_an_hour_takes_no_time(memory: InMemorySwarm) -> None:
    began, dht_time = time.monotonic(), matchmaking.get_dht_time()
    await asyncio.sleep(3600.0)
    assert matchmaking.time.monotonic() == memory.now == 4600.0
    assert matchmaking.get_dht_time() == pytest.approx(dht_time + 3600.0)
    assert time.monotonic() - began < 60.0
    assert get_dht_time is time.time, "of this module, nothing is changed"


def test_outside_of_a_test_all_clocks_are_those_of_the_machine() -> None:
    assert matchmaking.time is time
    assert matchmaking.get_dht_time is time.time


async def test_what_waits_in_threads_takes_turns_by_the_clock_of_the_loop(memory: InMemorySwarm) -> None:
    told: list[tuple[str, float]] = []

    def wait(name: str, seconds: float) -> None:
        for _ in range(3):
            matchmaking.time.sleep(seconds)
            told.append((name, memory.now - 1000.0))

    await asyncio.gather(memory.in_thread(wait, "a", 2.0), memory.in_thread(wait, "b", 3.5))
    assert told == [("a", 2.0), ("b", 3.5), ("a", 4.0), ("a", 6.0), ("b", 7.0), ("b", 10.5)]


async def test_time_stands_still_while_a_thread_works(memory: InMemorySwarm) -> None:
    async def tick() -> None:
        while True:
            await asyncio.sleep(0.001)
            ticks.append(memory.now)

    ticks: list[float] = []
    ticking = asyncio.ensure_future(tick())
    before = memory.now
    await memory.in_thread(sum, range(1_000_000))
    assert memory.now == before
    ticking.cancel()


async def test_an_answer_is_waited_for_in_vain_as_long_as_was_said(memory: InMemorySwarm) -> None:
    answer = Answer()
    began = memory.now
    with pytest.raises((TimeoutError, concurrent.futures.TimeoutError)):
        await memory.in_thread(answer.result, 7.0)
    assert memory.now - began == pytest.approx(7.0)
    with pytest.raises(RuntimeError, match="call it in an executor"):
        answer.result(7.0)


def test_a_loop_in_which_nothing_will_happen_says_so() -> None:
    loop = VirtualLoop()
    with pytest.raises(StandstillError):
        loop.run_until_complete(loop.create_future())
    loop.close()


async def test_a_thread_that_waits_for_ever_ends_with_its_loop(memory: InMemorySwarm) -> None:
    waiting = memory.in_thread(Answer().result)
    started = asyncio.ensure_future(waiting)
    await asyncio.sleep(1.0)
    assert not started.done()
    assert any(thread.name == "in-memory-worker" for thread in threading.enumerate())


def test_none_is_left_by_the_test_before() -> None:
    assert not any(thread.name == "in-memory-worker" for thread in threading.enumerate())


async def test_nobody_is_reached_over_a_line_that_is_cut_or_whose_other_end_has_died(memory: InMemorySwarm) -> None:
    one, other, third = await memory.join(3)
    connect = one.dht.p2p._client.connect
    memory.network.cut(one.peer_id, other.peer_id)
    began = memory.now
    with pytest.raises(P2PDaemonError, match="timeout"):
        await connect(other.peer_id, [])
    assert memory.now - began >= DIAL_TIMEOUT
    memory.network.heal()
    await connect(other.peer_id, [])
    assert [peer.peer_id for peer in await one.dht.p2p.list_peers()] == [other.peer_id]
    other.die()
    assert await one.dht.p2p.list_peers() == []
    with pytest.raises(P2PDaemonError, match="refused"):
        await connect(other.peer_id, [])
    await connect(third.peer_id, [])


async def test_what_was_sent_over_a_line_that_was_cut_arrives_when_it_is_whole_again(memory: InMemorySwarm) -> None:
    one, other = await memory.join(2)
    await one.dht.p2p._client.connect(other.peer_id, [])
    arrived: list[tuple[bytes, float]] = []

    async def read(stream: object, reader: asyncio.StreamReader, writer: object) -> None:
        while data := await reader.read(100):
            arrived.append((data, memory.now))

    await other.dht.p2p.add_binary_stream_handler("read", read)
    _, _, writer = await one.dht.p2p.call_binary_stream_handler(other.peer_id, "read")
    writer.write(b"before")
    await writer.drain()
    await asyncio.sleep(1.0)
    memory.network.cut(one.peer_id, other.peer_id)
    cut = memory.now
    for data in (b"one", b"two"):
        writer.write(data)
        await writer.drain()
    await asyncio.sleep(5.0)
    memory.network.heal()
    writer.close()
    await asyncio.sleep(1.0)
    assert b"".join(data for data, _ in arrived) == b"beforeonetwo"
    assert [at > cut + 4.9 for _, at in arrived] == [False, *[True] * (len(arrived) - 1)]
