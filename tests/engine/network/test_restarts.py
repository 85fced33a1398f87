"""A DHT whose process or daemon is killed is the same peer again, at the same ports, with the same neighbours."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import hivemind
import psutil
import pytest
from tiny import LOOPBACK

from hivenb.engine.network.access.identity import same_ports
from hivenb.engine.network.dht import DHT, reachable_addresses
from hivenb.engine.process import restart_count
from hivenb.engine.process.known_process import wait_for_exit
from hivenb.errors import ProcessEndedError, SwarmError
from hivenb.swarm import Swarm

#: Seconds within which an end is noticed and a DHT works again; much less where the machine is not busy.
BACK_WITHIN = 10.0

KILLED = r"(the process of the DHT|p2pd, the daemon of the DHT) \(process \d+\),? was killed by signal 9"


def daemon_of(dht: hivemind.DHT) -> int:
    return next(child.pid for child in psutil.Process(dht.pid).children() if child.name() == "p2pd")


PARTS: dict[str, Callable[[Any], int]] = {"daemon": daemon_of, "process": lambda dht: dht.pid}


@pytest.fixture
def two_dhts() -> Iterator[tuple[DHT, DHT]]:
    first = DHT(start=True, **LOOPBACK)
    second = DHT(start=True, initial_peers=list(reachable_addresses(first)), **LOOPBACK)
    yield first, second
    second.shutdown()
    first.shutdown()


def kill(dht: DHT, part: str, eventually: Callable[..., None]) -> None:
    """Kills a part, and waits until the DHT has another process."""
    before = dht.pid
    os.kill(PARTS[part](dht), signal.SIGKILL)
    eventually(lambda: dht.pid not in (before, None) or dht.ended, BACK_WITHIN)


def find_each_other(first: DHT, second: DHT) -> None:
    """Both answer, and each finds what the other one stores from now on."""
    end = time.monotonic() + BACK_WITHIN
    for writer, reader in ((first, second), (second, first)):
        found = None
        while found is None:
            assert time.monotonic() < end, "they do not find each other"
            with suppress(ProcessEndedError):  # was asked just before
                key = f"{writer.peer_id} at {time.time()}"
                writer.store(key, "here", expiration_time=time.time() + 60)
                found = reader.get(key, latest=True)


def test_it_is_the_same_peer_again(two_dhts, eventually):
    for part, which in itertools.product(PARTS, (0, 1)):  # the first one, and one that has joined
        victim, other = two_dhts[which], two_dhts[1 - which]
        peer_id, addresses = victim.peer_id, reachable_addresses(victim)
        eventually(lambda victim=victim: victim._neighbours.listeners, BACK_WITHIN)  # those it had met by then
        kill(victim, part, eventually)
        find_each_other(victim, other)
        assert victim.is_usable, (part, which)
        assert victim.peer_id == peer_id
        assert reachable_addresses(victim) == addresses
        assert victim.run_coroutine(_peer_id) == peer_id, "not only remembered"


async def _never(dht: hivemind.DHT, node: Any) -> Any:
    await asyncio.Event().wait()


async def _peer_id(dht: hivemind.DHT, node: Any) -> Any:
    return node.peer_id


def test_another_port_will_do_where_the_former_one_is_taken(two_dhts, eventually):
    victim, other = two_dhts
    (address,) = reachable_addresses(victim)
    port = int(address.split("/")[4])
    eventually(lambda: victim._neighbours.listeners, BACK_WITHIN)
    os.kill(victim.pid, signal.SIGSTOP)  # it dies as soon as it goes on, and its port is taken by then
    daemon = daemon_of(victim)
    os.kill(daemon, signal.SIGKILL)
    assert wait_for_exit(daemon, 10)
    with socket.create_server(("127.0.0.1", port)):
        os.kill(victim.pid, signal.SIGCONT)
        eventually(lambda: victim._earlier is not None and victim._works.is_set(), BACK_WITHIN)
        find_each_other(victim, other)
    assert reachable_addresses(victim) != (address,)


def test_who_asks_meanwhile_waits_and_is_answered(two_dhts):
    victim, _ = two_dhts
    asked = victim.run_coroutine(_never, return_future=True)
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(ProcessEndedError, match=KILLED):
        asked.result(BACK_WITHIN)
    assert victim.store("still", "there", expiration_time=time.time() + 60)


def test_one_that_ends_again_and_again_is_given_up_and_can_be_revived(two_dhts, eventually, monkeypatch):
    monkeypatch.setattr(restart_count, "MOST_RESTARTS", 1)
    victim, other = two_dhts
    kill(victim, "process", eventually)
    find_each_other(victim, other)
    kill(victim, "daemon", eventually)
    eventually(lambda: victim.ended, BACK_WITHIN)
    assert not victim.is_usable
    with pytest.raises(ProcessEndedError, match=KILLED + ".*after it had been started anew 1 times within 60 s"):
        victim.get("anything")
    peer_id = victim.peer_id
    victim.restart_if_ended()
    find_each_other(victim, other)
    assert victim.peer_id == peer_id


def test_who_revives_it_waits_for_what_is_tried_at_present(two_dhts, eventually, monkeypatch):
    victim, other = two_dhts
    tried, go_on, done = threading.Event(), threading.Event(), []
    start_anew = victim._start_anew

    def dawdle() -> None:
        tried.set()
        assert go_on.wait(BACK_WITHIN)
        start_anew()
        done.append("started anew")

    def restart_if_ended() -> None:
        victim.restart_if_ended()
        done.append("restarted")

    monkeypatch.setattr(victim, "_start_anew", dawdle)
    os.kill(victim.pid, signal.SIGKILL)
    assert tried.wait(BACK_WITHIN)
    with ThreadPoolExecutor(1) as pool:
        restarting = pool.submit(restart_if_ended)
        go_on.set()
        restarting.result(BACK_WITHIN)
    assert done == ["started anew", "restarted"]
    find_each_other(victim, other)


def test_two_who_revive_it_start_it_once(two_dhts, eventually, monkeypatch):
    monkeypatch.setattr(restart_count, "MOST_RESTARTS", 0)
    victim, other = two_dhts
    kill(victim, "process", eventually)
    eventually(lambda: victim.ended and victim._works.is_set(), BACK_WITHIN)
    monkeypatch.setattr(restart_count, "MOST_RESTARTS", 3)
    both, clear, started = threading.Barrier(2), victim._works.clear, []

    def clear_together() -> None:
        both.wait(BACK_WITHIN)
        clear()

    def count(start_anew: Any = victim._start_anew) -> None:
        started.append(1)
        start_anew()

    monkeypatch.setattr(victim._works, "clear", clear_together)
    monkeypatch.setattr(victim, "_start_anew", count)
    with ThreadPoolExecutor(2) as pool:
        for restarting in [pool.submit(victim.restart_if_ended) for _ in range(2)]:
            restarting.result(BACK_WITHIN)
    assert started == [1]
    monkeypatch.undo()
    find_each_other(victim, other)


def test_why_it_cannot_be_started_anew_is_said(two_dhts, eventually, monkeypatch):
    victim, _ = two_dhts
    victim.kwargs["host_maddrs"] = ["/ip4/192.0.2.1/tcp/4001"]  # no address of this machine
    kill(victim, "process", eventually)
    eventually(lambda: victim.ended, BACK_WITHIN)
    with pytest.raises(ProcessEndedError, match=KILLED + r".*\. It could not be started anew: .*192\.0\.2\.1"):
        victim.require()


@pytest.mark.process
def test_a_swarm_without_a_run_comes_back_too(eventually):
    with Swarm("comes-back") as swarm:
        invite, before = swarm.invite, swarm.dht.pid
        os.kill(before, signal.SIGKILL)
        eventually(lambda: swarm.dht.pid not in (before, None), BACK_WITHIN)
        assert swarm.is_open
        assert Swarm("comes-back") is swarm
        eventually(lambda: _asks(swarm), BACK_WITHIN)
        assert swarm.invite == invite


def _asks(swarm: Swarm) -> bool:
    try:
        return swarm.peers("nobody") == ()
    except SwarmError:
        return False


@pytest.mark.process
def test_one_that_is_closed_while_it_is_started_anew_stays_closed(eventually):
    dht = DHT(start=True, **LOOPBACK)
    os.kill(dht.pid, signal.SIGKILL)
    eventually(lambda: not dht._works.is_set() or dht._restarts, BACK_WITHIN)
    dht.shutdown()
    assert not dht.is_alive()
    assert not dht.is_usable


def test_the_ports_are_those_that_the_system_has_chosen():
    got = [f"{one}/p2p/12D3" for one in ("/ip4/10.0.0.1/udp/44/quic-v1", "/ip4/10.0.0.1/tcp/55", "/ip6/::1/tcp/66")]
    got = ["/ip4/203.0.113.5/tcp/31337/p2p/QmRelay/p2p-circuit/p2p/QmOwn", *got]
    assert same_ports(["/ip4/0.0.0.0/tcp/0", "/ip4/0.0.0.0/udp/0/quic-v1", "/ip6/::/tcp/0"], got) == [
        "/ip4/0.0.0.0/tcp/55",
        "/ip4/0.0.0.0/udp/44/quic-v1",
        "/ip6/::/tcp/66",
    ]
    assert same_ports(["/ip4/0.0.0.0/tcp/4001", "/ip4/0.0.0.0/udp/0/quic-v1"], got[2:]) == [
        "/ip4/0.0.0.0/tcp/4001",
        "/ip4/0.0.0.0/udp/0/quic-v1",
    ]
