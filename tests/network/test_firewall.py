"""What comes in through a firewall, and what does not."""

from __future__ import annotations

import struct

import pytest

from network.firewall import REMEMBERED, Firewall
from network.packet import TCP, UDP, Flow, flow_of

OUT = Flow(TCP, ("10.77.0.1", 4000), ("10.77.0.2", 80))


def test_nobody_comes_in_uninvited() -> None:
    assert not Firewall().lets_in(OUT.back, 0.0)


def test_answers_come_in_for_as_long_as_they_go_on() -> None:
    wall = Firewall()
    flow = Flow(UDP, *[(OUT.source), (OUT.target)])
    wall.note_sent(flow, 0.0)
    for number in range(1, 10):
        assert wall.lets_in(flow.back, number * 0.9 * REMEMBERED)
    assert not wall.lets_in(flow.back, 100 * REMEMBERED)
    assert not wall.lets_in(flow.back, 100 * REMEMBERED), "nor does it open again by being tried"


@pytest.mark.parametrize(
    "stranger",
    [
        Flow(TCP, ("10.77.0.3", 80), OUT.source),
        Flow(TCP, ("10.77.0.2", 81), OUT.source),
        Flow(TCP, OUT.target, ("10.77.0.1", 4001)),
        Flow(UDP, OUT.target, OUT.source),
    ],
    ids=["another host", "another port", "to another port", "another protocol"],
)
def test_nothing_else_does(stranger: Flow) -> None:
    wall = Firewall()
    wall.note_sent(OUT, 0.0)
    assert wall.lets_in(OUT.back, 1.0)
    assert not wall.lets_in(stranger, 1.0)


def ipv4(protocol: int, payload: bytes, offset: int = 0, options: bytes = b"") -> bytes:
    first = 0x40 | (5 + len(options) // 4)
    header = struct.pack("!BBHHHBBH", first, 0, 20 + len(payload), 0, offset, 64, protocol, 0)
    return header + bytes([10, 77, 0, 1]) + bytes([10, 77, 0, 2]) + options + payload


@pytest.mark.parametrize("options", [b"", bytes(4)])
def test_a_packet_tells_who_sends_it_to_whom(options: bytes) -> None:
    assert flow_of(ipv4(TCP, struct.pack("!HH", 4000, 80) + bytes(16), options=options)) == OUT


def test_what_has_no_ports_has_none() -> None:
    ports = struct.pack("!HH", 4000, 80)
    assert flow_of(ipv4(1, ports)) == Flow(1, ("10.77.0.1", 0), ("10.77.0.2", 0))
    assert flow_of(ipv4(UDP, ports, offset=3)) == Flow(UDP, ("10.77.0.1", 0), ("10.77.0.2", 0))
    assert flow_of(ipv4(UDP, b"\x00")) == Flow(UDP, ("10.77.0.1", 0), ("10.77.0.2", 0))


@pytest.mark.parametrize("packet", [b"", bytes(19), b"\x60" + bytes(39)], ids=["nothing", "too short", "IPv6"])
def test_what_is_no_ipv4_is_no_flow(packet: bytes) -> None:
    assert flow_of(packet) is None
