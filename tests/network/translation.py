"""Address translation as a router at home has it: hosts behind it have addresses of their own, and share its one."""

from __future__ import annotations

import socket
import struct

from network.packet import TCP, UDP, Flow, flow_of, header_size

#: Ports of the router that it gives away.
_PORTS = range(20_000, 60_000)

#: Where in the header of a protocol its checksum is.
_CHECKSUM_AT = {TCP: 16, UDP: 6}


class Translation:
    """Of one host.

    A port of the host has one and the same port of the router for all whom it talks to, as with most routers (RFC 4787,
    endpoint-independent mapping), by which peers can tell each other where they are. With others, that of an office for
    one, it has another port for each of them (address and port-dependent mapping), and nobody can be told.

    :param inner: the host's own address
    :param outer: the router's
    :param is_symmetric: whether it has another port for each whom it talks to
    """

    def __init__(self, inner: str, outer: str, is_symmetric: bool = False) -> None:
        self._inner, self._outer, self._is_symmetric = inner, outer, is_symmetric
        self._ports: dict[tuple[object, ...], int] = {}
        self._owners: dict[tuple[int, int], int] = {}

    def outward(self, packet: bytes) -> bytes | None:
        """A packet of the host as it is on the other side; ``None`` if it cannot be there."""
        flow = flow_of(packet)
        if flow is None or flow.protocol not in _CHECKSUM_AT or not flow.source[1]:
            return None
        return _rewritten(packet, 12, 0, (self._outer, self._port_of(flow)))

    def inward(self, packet: bytes) -> bytes | None:
        """A packet for the router as it is for the host; ``None`` if there is no such port."""
        flow = flow_of(packet)
        owner = None if flow is None else self._owners.get((flow.protocol, flow.target[1]))
        return None if owner is None else _rewritten(packet, 16, 2, (self._inner, owner))

    def _port_of(self, flow: Flow) -> int:
        key = (flow.protocol, flow.source[1], *([flow.target] if self._is_symmetric else []))
        if key not in self._ports:
            self._ports[key] = port = _PORTS[len(self._ports)]
            self._owners[flow.protocol, port] = flow.source[1]
        return self._ports[key]


def _rewritten(packet: bytes, address_at: int, port_at: int, to: tuple[str, int]) -> bytes:
    """With another address, another port and the checksums for them (RFC 1624).

    :param address_at: where in the header of IP
    :param port_at: where in the one behind it
    """
    new, behind = bytearray(packet), header_size(packet)
    checksum_at = behind + _CHECKSUM_AT[packet[9]]
    address, port = socket.inet_aton(to[0]), struct.pack("!H", to[1])
    old_address, old_port = packet[address_at : address_at + 4], packet[behind + port_at : behind + port_at + 2]
    new[address_at : address_at + 4] = address
    new[behind + port_at : behind + port_at + 2] = port
    _adapt(new, 10, old_address, address)
    if packet[9] == TCP or packet[checksum_at : checksum_at + 2] != b"\0\0":  # else the datagram has none
        _adapt(new, checksum_at, old_address + old_port, address + port)
    return bytes(new)


def _adapt(packet: bytearray, at: int, old: bytes, new: bytes) -> None:
    words = struct.Struct(f"!{len(old) // 2}H")
    (checksum,) = struct.unpack_from("!H", packet, at)
    total = (checksum ^ 0xFFFF) + sum(word ^ 0xFFFF for word in words.unpack(old)) + sum(words.unpack(new))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    struct.pack_into("!H", packet, at, total ^ 0xFFFF)
