"""The delay, the rate and the loss that were asked for are what comes out, between real hosts."""

from __future__ import annotations

import multiprocessing as mp
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import forked
import pytest

from network import probe
from network.internet import Internet, why_not
from network.line import Line

pytestmark = [pytest.mark.process, pytest.mark.quiet]

#: Seconds within which a probe tells what it has found.
PATIENCE = 60.0

#: Seconds by which this machine may be late, in the middle of a measurement.
LATE = 0.03


@pytest.fixture(scope="module", autouse=True)
def allowed() -> None:
    if reason := why_not():
        pytest.skip(reason)


Start = Callable[..., Connection]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts probes, which end with the test."""
    with ExitStack() as ended:

        def begin(target: Callable[..., None], *args: Any) -> Connection:
            here, there = mp.Pipe()
            process = forked.start(target, args[0], there, *args[1:])
            there.close()
            ended.callback(process.join)
            ended.callback(process.kill)
            return here

        yield begin


def told(connection: Connection) -> Any:
    assert connection.poll(PATIENCE), "a probe tells nothing"
    return connection.recv()


@contextmanager
def echoing(start: Start, *lines: Line) -> Iterator[Internet]:
    """Hosts, the second of which sends all datagrams back."""
    with Internet(lines) as internet:
        assert told(start(probe.echo, internet.enter_as(1), internet.address(1))) == "ready"
        yield internet


def round_trips(
    start: Start, internet: Internet, count: int = 50, pause: float = 0.2, patience: float = 2.0
) -> list[float]:
    args = (internet.enter_as(0), internet.address(1), count, pause, patience)
    return list(told(start(probe.round_trips, *args)))


def test_a_round_trip_takes_both_delays_twice(start: Start) -> None:
    with echoing(start, Line(delay=0.03), Line(delay=0.02)) as internet:
        found = round_trips(start, internet)
    assert len(found) == 50
    assert min(found) >= 0.1
    assert median(found) < 0.1 + LATE


def test_jitter_makes_packets_late_and_loses_none(start: Start) -> None:
    with echoing(start, Line(delay=0.02, jitter=0.1), Line()) as internet:
        found = round_trips(start, internet, pause=0.5)
    assert len(found) == 50
    assert min(found) >= 0.04
    assert 0.09 < median(found) < 0.19 + LATE
    assert max(found) > 0.14


def test_as_many_packets_get_lost_as_was_asked_for(start: Start) -> None:
    with echoing(start, Line(loss=0.05, queue=10.0), Line(loss=0.05, queue=10.0)) as internet:
        count = 2000
        found = round_trips(start, internet, count, pause=0.0005)
        forwarded, dropped = internet.packets
    assert len(found) / count == pytest.approx(0.95**4, abs=0.04)
    assert dropped / (forwarded + dropped) == pytest.approx(1 - 0.95**2, abs=0.03)


@pytest.mark.parametrize(
    ("lines", "bits"),
    [
        ([Line(up=8e6), Line()], 8e6),
        ([Line(), Line(down=8e6)], 8e6),
        ([Line(down=1e6), Line(up=1e6)], 40e6),
        ([Line(up=20e6, delay=0.025), Line(down=40e6, delay=0.025)], 20e6),
    ],
    ids=["the sender's", "the receiver's", "neither, the other way", "the slower one, over a long line"],
)
def test_a_stream_has_the_rate_of_the_slower_line(start: Start, lines: list[Line], bits: float) -> None:
    lines = [line | {"up": min(line.up, 40e6), "down": min(line.down, 40e6)} for line in lines]
    with Internet(lines) as internet:
        server = start(probe.serve_stream, internet.enter_as(1), internet.address(1))
        assert told(server) == "ready"
        size = int(bits / 8 * 3.0)
        client = start(probe.send_stream, internet.enter_as(0), internet.address(1), size, PATIENCE)
        rate = 8 * told(server)
        assert told(client) == "taken"
    assert 0.6 * bits < rate < 1.02 * bits


@pytest.mark.parametrize("largest_packet", [1400, 9000])
def test_what_a_host_sends_is_counted(start: Start, largest_packet: int) -> None:
    with Internet([Line(), Line()], largest_packet=largest_packet) as internet:
        server = start(probe.serve_stream, internet.enter_as(1), internet.address(1))
        assert told(server) == "ready"
        before, size = internet.bytes_sent(0), 1_000_000
        client = start(probe.send_stream, internet.enter_as(0), internet.address(1), size, PATIENCE)
        assert told(client) == "taken"
        assert size < internet.bytes_sent(0) - before < 1.2 * size
        assert internet.bytes_sent(1) < 0.3 * size
        assert (internet.packets[0] < 500) is (largest_packet > 1400)


def test_nobody_reaches_who_is_behind_a_wall_and_it_reaches_everybody(start: Start) -> None:
    with Internet([Line(), Line(is_walled=True), Line()]) as internet:
        behind, outside = (
            start(probe.serve_stream, internet.enter_as(host), internet.address(host)) for host in (1, 2)
        )
        assert told(behind) == told(outside) == "ready"
        in_vain = start(probe.send_stream, internet.enter_as(0), internet.address(1), 1000, 3.0)
        assert told(in_vain) == "no answer"
        outwards = start(probe.send_stream, internet.enter_as(1), internet.address(2), 100_000, PATIENCE)
        assert told(outwards) == "taken"


@pytest.mark.parametrize("is_symmetric", [False, True])
def test_behind_a_router_that_translates_it_is_the_same(start: Start, is_symmetric: bool) -> None:
    home = Line(is_translated=True, is_symmetric=is_symmetric)
    with Internet([home, Line(), home]) as internet:
        outside = start(probe.serve_stream, internet.enter_as(1), internet.address(1))
        assert told(outside) == "ready"
        behind = start(probe.serve_stream, internet.enter_as(2), "0.0.0.0")
        assert told(behind) == "ready"
        in_vain = start(probe.send_stream, internet.enter_as(0), internet.address(2), 1000, 3.0)
        assert told(in_vain) == "no answer"
        outwards = start(probe.send_stream, internet.enter_as(0), internet.address(1), 1_000_000, PATIENCE)
        assert told(outwards) == "taken"
        assert told(outside) > 0


def test_datagrams_come_back_through_a_router_that_translates(start: Start) -> None:
    with echoing(start, Line(is_translated=True, delay=0.02), Line()) as internet:
        found = round_trips(start, internet, pause=0.1)
    assert len(found) == 50
    assert min(found) >= 0.04


def test_a_stream_goes_on_after_a_cut(start: Start, eventually: Callable[..., None]) -> None:
    with Internet([Line(up=4e6), Line()]) as internet:
        server = start(probe.serve_stream, internet.enter_as(1), internet.address(1))
        assert told(server) == "ready"
        client = start(probe.send_stream, internet.enter_as(0), internet.address(1), 1_000_000, PATIENCE)
        eventually(lambda: internet.packets[0] > 200)
        internet.change(1, is_cut=True)
        assert not server.poll(3.0), "all of it would have been there by now"
        internet.change(1, is_cut=False)
        assert told(server) > 0
        assert told(client) == "taken"


def test_nothing_is_left_of_it(start: Start) -> None:
    with Internet([Line()]) as internet:
        space = internet._spaces[0]
        assert set(os.listdir("/run/netns")) >= {space}
    assert space not in set(os.listdir("/run/netns"))


def test_the_hosts_of_a_process_that_was_killed_are_removed(start: Start) -> None:
    made, killed = mp.Pipe()
    other = forked.start(_make_hosts, killed)
    killed.close()
    assert made.poll(90.0)
    space = made.recv()
    other.kill()
    other.join()
    assert space in os.listdir("/run/netns")
    with Internet([Line()]):
        assert space not in os.listdir("/run/netns")


def _make_hosts(connection: Connection) -> None:
    with Internet([Line()]) as internet:
        connection.send(internet._spaces[0])
        connection.poll(None)
