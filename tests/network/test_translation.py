"""Addresses and ports are translated there and back, and checksums with them."""

from __future__ import annotations

import socket
import struct

import pytest

from network.packet import TCP, UDP, Flow, flow_of
from network.translation import Translation

INNER, OUTER = "192.168.7.2", "51.77.0.1"
SERVER, OTHER = ("51.77.0.9", 80), ("51.77.0.8", 81)


def checksum(content: bytes) -> int:
    words = struct.unpack(f"!{(len(content) + 1) // 2}H", content + bytes(len(content) % 2))
    total = sum(words)
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total ^ 0xFFFF


def packet(flow: Flow, payload: bytes = b"hello", has_checksum: bool = True, options: bytes = b"") -> bytes:
    """As a host sends it, with the checksums that it has."""
    source, target = (socket.inet_aton(address) for address, _ in (flow.source, flow.target))
    ports = struct.pack("!HH", flow.source[1], flow.target[1])
    if flow.protocol == UDP:
        inside = ports + struct.pack("!HH", 8 + len(payload), 0) + payload
        at = 6
    else:
        inside = ports + struct.pack("!IIBBHHH", 1, 2, 5 << 4, 0x18, 500, 0, 0) + payload
        at = 16
    if has_checksum:
        pseudo = source + target + struct.pack("!BBH", 0, flow.protocol, len(inside))
        inside = inside[:at] + struct.pack("!H", checksum(pseudo + inside)) + inside[at + 2 :]
    size = 20 + len(options) + len(inside)
    first = 0x40 | (5 + len(options) // 4)
    header = struct.pack("!BBHHHBBH", first, 0, size, 7, 0, 64, flow.protocol, 0) + source + target + options
    return header[:10] + struct.pack("!H", checksum(header)) + header[12:] + inside


@pytest.mark.parametrize("options", [b"", bytes(4)])
@pytest.mark.parametrize("protocol", [UDP, TCP])
@pytest.mark.parametrize("payload", [b"", b"odd", b"even", bytes(range(256))])
def test_what_comes_out_is_what_the_other_address_would_have_sent(
    protocol: int, payload: bytes, options: bytes
) -> None:
    translation = Translation(INNER, OUTER)
    sent = translation.outward(packet(Flow(protocol, (INNER, 4000), SERVER), payload, options=options))
    assert sent is not None
    flow = flow_of(sent)
    assert flow is not None
    assert (flow.source[0], flow.target) == (OUTER, SERVER)
    assert sent == packet(flow, payload, options=options)
    answer = translation.inward(packet(flow.back, payload, options=options))
    assert answer == packet(Flow(protocol, SERVER, (INNER, 4000)), payload, options=options)


def test_a_datagram_without_a_checksum_gets_none() -> None:
    flow = Flow(UDP, (INNER, 4000), SERVER)
    sent = Translation(INNER, OUTER).outward(packet(flow, has_checksum=False))
    assert sent is not None
    assert sent[26:28] == b"\0\0"


def source(translation: Translation, port: int, target: tuple[str, int]) -> tuple[str, int]:
    sent = translation.outward(packet(Flow(UDP, (INNER, port), target)))
    flow = None if sent is None else flow_of(sent)
    assert flow is not None
    return flow.source


def test_a_port_is_the_same_for_all_unless_the_router_is_symmetric() -> None:
    usual, symmetric = Translation(INNER, OUTER), Translation(INNER, OUTER, is_symmetric=True)
    assert source(usual, 4000, SERVER) == source(usual, 4000, OTHER) != source(usual, 4001, SERVER)
    assert source(symmetric, 4000, SERVER) == source(symmetric, 4000, SERVER) != source(symmetric, 4000, OTHER)


def test_what_nobody_has_asked_for_is_for_nobody() -> None:
    translation = Translation(INNER, OUTER)
    port = source(translation, 4000, SERVER)[1]
    assert translation.inward(packet(Flow(UDP, SERVER, (OUTER, port)))) is not None
    for stranger in (Flow(UDP, SERVER, (OUTER, port + 1)), Flow(TCP, SERVER, (OUTER, port))):
        assert translation.inward(packet(stranger)) is None


def test_what_has_no_ports_stays_at_home() -> None:
    ping = packet(Flow(UDP, (INNER, 0), SERVER))
    assert Translation(INNER, OUTER).outward(ping[:9] + b"\x01" + ping[10:]) is None
    assert Translation(INNER, OUTER).outward(b"") is None
