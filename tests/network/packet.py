"""What a router reads of an IPv4 packet."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

TCP, UDP = 6, 17

#: Bytes of an IPv4 header without options.
_LEAST = 20


@dataclass(frozen=True)
class Flow:
    """Who sends to whom.

    :param protocol: number of the protocol over IP
    :param source: address and port; port 0 where there are none
    :param target: the same
    """

    protocol: int
    source: tuple[str, int]
    target: tuple[str, int]

    @property
    def back(self) -> Flow:
        """The other way round."""
        return Flow(self.protocol, self.target, self.source)


def flow_of(packet: bytes) -> Flow | None:
    """Who sends a packet to whom; ``None`` if it is none of IPv4.

    Of a fragment that is not the first one, the ports are not known.
    """
    if len(packet) < _LEAST or packet[0] >> 4 != 4:
        return None
    header = header_size(packet)
    is_later_fragment = struct.unpack_from("!H", packet, 6)[0] & 0x1FFF
    source, target = socket.inet_ntoa(packet[12:16]), socket.inet_ntoa(packet[16:20])
    ports = (0, 0)
    if packet[9] in (TCP, UDP) and not is_later_fragment and len(packet) >= header + 4:
        ports = struct.unpack_from("!HH", packet, header)
    return Flow(packet[9], (source, ports[0]), (target, ports[1]))


def header_size(packet: bytes) -> int:
    """Bytes of the IPv4 header, with its options."""
    return 4 * (packet[0] & 15)
