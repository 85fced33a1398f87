"""Who sends slowly averages less: peers find out what their lines can send, and share a model out by that."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection

import forked
import pytest
import torch
from hivemind.utils import get_dht_time

from hivenb import compression
from hivenb.engine.averaging.gradient_averager import GradientAverager
from hivenb.engine.network.dht import DHT
from network.internet import Internet, why_not
from network.line import Line

pytestmark = [pytest.mark.process, pytest.mark.quiet, pytest.mark.timeout(300)]

#: Seconds within which a round is over.
PATIENCE = 90.0

#: Numbers of a model, and the bytes in which its gradients are sent.
NUMBERS = 420_000
SIZE = 2 * NUMBERS

#: The fast ones are slow enough for a busy machine to keep up with.
FAST, SLOW = Line(delay=0.01, up=15e6, down=15e6), Line(delay=0.01, up=2e6, down=15e6)
LINES = [FAST, FAST, SLOW]


@pytest.fixture(scope="module", autouse=True)
def allowed() -> None:
    if reason := why_not():
        pytest.skip(reason)


def average(enter: Callable[[], None], connection: Connection, address: str, peers: Sequence[str]) -> None:
    """A peer that averages ones as often as it is told to."""
    enter()
    torch.set_num_threads(1)
    dht = DHT(initial_peers=list(peers), host_maddrs=[f"/ip4/{address}/tcp/0"], auto_nat=False, start=True)
    connection.send([str(address) for address in dht.get_visible_maddrs()])
    parameter = torch.nn.Parameter(torch.zeros(NUMBERS))
    averager = GradientAverager(
        [parameter],
        dht=dht,
        prefix="uneven",
        compression=compression.codec("float16"),
        target_group_size=len(LINES),
        min_matchmaking_time=PATIENCE,
        start=True,
    )
    while (number := connection.recv()) != "end":
        parameter.grad = torch.ones(NUMBERS)
        averager.accumulate_grads_(batch_size=1)
        group = averager.step(gather=number, scheduled_time=get_dht_time() + 1.0, timeout=PATIENCE)
        connection.send(len(group))
    averager.shutdown()
    dht.shutdown()


@pytest.fixture
def three(allowed: None) -> Iterator[tuple[Internet, list[Connection]]]:
    with ExitStack() as ended:
        internet = ended.enter_context(Internet(LINES))
        connections: list[Connection] = []
        known: list[str] = []
        for host in range(len(LINES)):
            here, there = mp.Pipe()
            process = forked.start(average, internet.enter_as(host), there, internet.address(host), list(known))
            there.close()
            ended.callback(forked.end, here, process)
            connections.append(here)
            assert here.poll(PATIENCE), "the peer does not begin"
            known += here.recv()
        yield internet, connections


def bytes_of_round(number: int, internet: Internet, peers: Sequence[Connection]) -> list[int]:
    """What each of them has sent in a round of all."""
    before = [internet.bytes_sent(host) for host in range(len(LINES))]
    for peer in peers:
        peer.send(number)
    for peer in peers:
        assert peer.poll(PATIENCE), "the round does not end"
        assert peer.recv() == len(LINES)
    return [internet.bytes_sent(host) - sent for host, sent in enumerate(before)]


def test_who_sends_slowly_averages_less_from_the_second_round_on(three: tuple[Internet, list[Connection]]) -> None:
    rounds = [bytes_of_round(number, *three) for number in range(3)]
    print(*rounds, sep="\n")
    assert min(rounds[0]) > 1.3 * SIZE, "all average a third"
    assert sum(rounds[2][:2]) > 1.04 * sum(rounds[0][:2]), "the fast ones share out what it does not"
    assert rounds[2][2] < 0.85 * rounds[0][2], "the slow one sends hardly more than its own numbers"
