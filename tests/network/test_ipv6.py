"""Machines that have IPv6 only: they find each other by an invite, and one without any address is told so."""

from __future__ import annotations

import itertools
import multiprocessing as mp
import os
import subprocess
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection

import forked
import pytest
from namespaces import enter

import hivenb
from hivenb.engine.network.addresses import Reach, has_ipv6, is_loopback
from network.internet import why_not

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

#: Seconds within which a swarm is opened, or joined.
PATIENCE = 90.0

#: Addresses of the hosts, out of those that the real internet has: libp2p looks at that.
ADDRESSES = ("2a01:4f8:c2c:1::1", "2a01:4f8:c2c:1::2")

_numbers = itertools.count(1)


@pytest.fixture(scope="module", autouse=True)
def allowed() -> None:
    if reason := why_not():
        pytest.skip(reason)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[Callable[[], None]]]:
    """What moves the process that calls it to a host: two with an IPv6 address each, and one with none."""
    own = f"hn{os.getpid()}-six{next(_numbers)}"
    spaces = [f"{own}-{number}" for number in range(3)]
    with ExitStack() as ended:
        for space in spaces:
            ip("netns", "add", space)
            ended.callback(ip, "netns", "del", space)
            ip("-n", space, "link", "set", "lo", "up")
        ip("link", "add", "line", "netns", spaces[0], "type", "veth", "peer", "name", "line", "netns", spaces[1])
        for space, address in zip(spaces, ADDRESSES, strict=False):
            ip("-n", space, "addr", "add", f"{address}/64", "dev", "line", "nodad")
            ip("-n", space, "link", "set", "line", "up")
        yield [partial(enter, space) for space in spaces]


def be_there(enter_host: Callable[[], None], told: Connection, invite: str | None) -> None:
    """A peer on a host, which tells how it is reached and what it was warned of, until it is told to end."""
    enter_host()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        swarm = hivenb.Swarm(public=True) if invite is None else hivenb.Swarm.join(invite)
    with swarm:
        words = [str(one.message) for one in warned if one.category is UserWarning]
        told.send((swarm.invite, swarm.addresses, swarm.dht.reach, words, has_ipv6()))
        told.poll(None)


@pytest.fixture
def open_on(hosts) -> Iterator[Callable[..., tuple]]:
    with ExitStack() as ended:

        def start(host: int, invite: str | None = None) -> tuple:
            here, there = mp.Pipe()
            process = forked.start(be_there, hosts[host], there, invite)
            there.close()
            ended.callback(process.kill)
            ended.callback(process.join, PATIENCE)
            ended.callback(here.close)  # which lets it end
            assert here.poll(PATIENCE), "it has not opened or joined its swarm"
            return here.recv()

        yield start


def test_two_hosts_with_ipv6_only_find_each_other(open_on):
    invite, addresses, _, warned, has_it = open_on(0)
    assert has_it
    assert warned == []
    assert {address.split("/")[2] for address in addresses} == {ADDRESSES[0]}
    _, of_guest, reach, _, _ = open_on(1, invite)
    assert {address.split("/")[2] for address in of_guest} == {ADDRESSES[1]}
    assert reach is Reach.DIRECTLY, "the first one has connected to it"


def test_a_host_without_any_address_is_told_that_nobody_can_join(open_on):
    _, addresses, _, warned, has_it = open_on(2)
    assert not has_it
    assert all(map(is_loopback, addresses))
    (said,) = warned
    assert "no address at which another one could reach it" in said
    assert "announce_maddrs=" in said
