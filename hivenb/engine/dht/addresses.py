"""Multiaddresses at which a DHT listens, and who can reach them."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from pathlib import Path

from hivenb.errors import SwarmError

#: This machine alone, at whichever port is free.
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)

#: Every network of this machine, at whichever ports are free.
PUBLIC = ("/ip4/0.0.0.0/tcp/0", "/ip4/0.0.0.0/udp/0/quic-v1")

_CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")

#: A part of each address through a relay.
CIRCUIT = "/p2p-circuit"


class Reach(Enum):
    """How others reach a peer, in words."""

    UNKNOWN = ""
    DIRECTLY = "direct"
    RELAYED = "through a relay"
    NOT = "only outwards"


def public_addresses() -> tuple[str, ...]:
    """:data:`PUBLIC`; without QUIC where the system's TCP is quicker.

    libp2p takes QUIC where it can. That is quicker than TCP as Linux has it unless told otherwise, and far slower than
    TCP with BBR where packets get lost (``tests/benchmarks/internet.py --transports``).
    """
    try:
        has_bbr = _CONGESTION_CONTROL.read_text().startswith("bbr")
    except OSError:  # a sandbox that does not tell
        has_bbr = False
    return PUBLIC[:1] if has_bbr else PUBLIC


def is_loopback(address: str) -> bool:
    """Whether only this machine itself can reach a multiaddress."""
    return address.startswith(("/ip4/127.", "/ip6/::1/"))


def routes(addresses: Iterable[str]) -> dict[str, Reach]:
    """How peers are connected, by their ids: directly, where one has that connection as well.

    :param addresses: multiaddresses of connections, each with the id of its peer
    """
    found: dict[str, Reach] = {}
    for address in addresses:
        way, _, peer_id = address.rpartition("/p2p/")
        if found.get(peer_id) is not Reach.DIRECTLY:
            found[peer_id] = Reach.RELAYED if CIRCUIT in way else Reach.DIRECTLY
    return found


def read_maddrs(name: str, given: str | Iterable[object] | None) -> tuple[str, ...]:
    """Multiaddresses of this peer, as somebody has given them.

    :param name: of the parameter
    :param given: one, or several
    :raises SwarmError: if one cannot be read
    """
    from hivemind.utils.multiaddr import Multiaddr

    addresses = (given,) if isinstance(given, str) else tuple(str(one) for one in given or ())
    for address in addresses:
        try:
            Multiaddr(address)
        except ValueError as e:
            raise SwarmError(
                f"{name}={address!r} is no multiaddress ({e}); one looks like {PUBLIC[0]}, or give a list of them"
            ) from e
    return addresses
