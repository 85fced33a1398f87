"""The DHT process: born on any thread, deaf to bad messages, and never without its daemon or the daemon without it."""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.p2p import P2P
from tiny import LOOPBACK

from hivenb.engine.network.daemon import TiedP2P
from hivenb.engine.network.dht import DHT, reachable_addresses
from hivenb.engine.network.records import SignatureValidator
from hivenb.engine.process.known_process import wait_for_exit


def open_dht(**kwargs: Any) -> DHT:
    return DHT(start=True, **{**LOOPBACK, **kwargs})


def daemon_of(dht: DHT) -> psutil.Process:
    return next(p for p in psutil.Process(dht.pid).children() if "p2pd" in p.name())


class Unreadable:
    """Cannot be unpickled anywhere."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)


@pytest.fixture(scope="module")
def dht() -> Iterator[DHT]:
    opened = open_dht()
    yield opened
    opened.shutdown()


@pytest.mark.process
@pytest.mark.parametrize("on_main_thread", [True, False])
def test_two_meet_and_the_interrupt_button_still_works(on_main_thread: bool) -> None:
    before = signal.getsignal(signal.SIGINT)
    found: list[Any] = []

    def meet() -> None:
        first = open_dht()
        second = open_dht(initial_peers=list(reachable_addresses(first)))
        second.store("greeting", "hello", expiration_time=time.time() + 60)
        record = first.get("greeting", latest=True)
        found.append(record and record.value)
        second.shutdown()
        first.shutdown()

    if on_main_thread:
        meet()
    else:
        thread = threading.Thread(target=meet)
        thread.start()
        thread.join(90)
    assert found == ["hello"]
    assert signal.getsignal(signal.SIGINT) is before


def test_interrupts_hit_neither_the_process_nor_its_daemon(dht: DHT) -> None:
    daemon = daemon_of(dht)
    assert os.getpgid(daemon.pid) != os.getpgrp(), "the notebook's interrupt goes to the kernel's whole group"
    os.kill(dht.pid, signal.SIGINT)
    assert dht.store("still", "there", expiration_time=time.time() + 60)
    assert daemon.is_running()


def test_messages_that_cannot_be_read_do_no_harm(dht: DHT) -> None:
    # the first kind is what an averager that died leaves behind
    dht._outer_pipe.send_bytes(pickle.dumps(Unreadable()))
    dht._outer_pipe.send_bytes(b"")
    dht._outer_pipe.send_bytes(b"garbage")
    dht._outer_pipe.send_bytes(pickle.dumps(("_get", [])))
    assert dht.store("still", "there", expiration_time=time.time() + 60)
    assert dht.get("still").value == "there"


def test_a_request_for_nothing_known_does_no_harm(dht: DHT) -> None:
    dht._outer_pipe.send(("_no_such_method", [], {}))
    assert dht.store("still", "there", expiration_time=time.time() + 60)


@pytest.mark.process
def test_the_daemon_dies_with_the_process() -> None:
    dht = open_dht()
    daemon = daemon_of(dht).pid
    dht.kill()
    assert wait_for_exit(daemon, 10)


@pytest.mark.process
def test_shutting_down_ends_both_and_leaves_no_socket_file() -> None:
    dht = open_dht()
    daemon = daemon_of(dht)
    sockets = re.findall(r"/unix(/\S+\.sock)", " ".join(daemon.cmdline()))
    assert sockets
    assert any(os.path.exists(path) for path in sockets)
    dht.shutdown()
    assert not dht.is_alive()
    assert wait_for_exit(daemon.pid, 10)
    assert not any(os.path.exists(path) for path in sockets)


def test_each_has_a_key_of_its_own(dht: DHT) -> None:
    """Else two peers in one process would count as one."""
    other = open_dht()
    try:
        assert other.private_key.get_public_key().to_bytes() != dht.private_key.get_public_key().to_bytes()
    finally:
        other.shutdown()


@pytest.mark.process
def test_a_peer_that_does_not_answer_is_an_error() -> None:
    nobody = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWNTpTGNxFtZXDLUk9SpcvF6Qv1bfSVFnZfAhkuBbHbRBq"
    with pytest.raises(Exception, match="bootstrap"):
        open_dht(initial_peers=[nobody])


@pytest.mark.process
def test_a_port_in_use_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Exception, match="address already in use"):
            open_dht(host_maddrs=[f"/ip4/127.0.0.1/tcp/{port}"])


@pytest.mark.process
def test_settings_of_the_daemon_and_of_the_node_reach_them() -> None:
    dht = open_dht(client_mode=True, cache_locally=False, idle_timeout=10.0)
    try:
        assert dht.client_mode
        command = " ".join(daemon_of(dht).cmdline())
        assert "-dhtClient=1" in command
        assert "-idleTimeout=10.0s" in command
    finally:
        dht.shutdown()


@pytest.mark.process
def test_a_running_daemon_can_be_borrowed_and_lives_on() -> None:
    async def lend() -> None:
        p2p = await TiedP2P.create(host_maddrs=LOOPBACK["host_maddrs"])
        try:
            borrower = DHT(start=True, p2p=p2p)
            assert borrower.peer_id == p2p.peer_id
            borrower.shutdown()
            assert not borrower.is_alive()
            assert await p2p.list_peers() == []  # it answers
        finally:
            await p2p.shutdown()

    asyncio.run(lend())


def test_an_address_of_this_machine_is_told_only_where_there_is_no_other(dht: DHT) -> None:
    assert all(address.startswith("/ip4/127.0.0.1/tcp/") for address in reachable_addresses(dht))
    assert all(dht.peer_id.to_base58() in address for address in reachable_addresses(dht))


def test_the_daemon_is_started_with_upstreams_own_command() -> None:
    whole = P2P._make_process_args("p2pd", listen="x")
    assert TiedP2P._make_process_args("p2pd", listen="x")[-len(whole) :] == whole


def test_it_checks_each_signature_once(dht: DHT) -> None:
    (signatures,) = [v for v in dht._record_validator._validators if isinstance(v, RSASignatureValidator)]
    assert isinstance(signatures, SignatureValidator)
