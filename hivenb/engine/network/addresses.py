"""Multiaddresses at which a DHT listens, and who can reach them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from pathlib import Path
from socket import AF_INET6

import psutil

from hivenb.errors import SwarmError

#: This machine alone, at whichever port is free.
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)

#: Every IPv4 network of this machine, at whichever ports are free.
PUBLIC = ("/ip4/0.0.0.0/tcp/0", "/ip4/0.0.0.0/udp/0/quic-v1")

#: What such an address begins with, for each family.
_ALL_IPV4, _ALL_IPV6 = "/ip4/0.0.0.0/", "/ip6/::/"

#: What those begin with that an interface gives itself (RFC 4291, section 2.5.6).
_OF_ONE_LINK = "fe80:"

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
    """:data:`PUBLIC`, with IPv6 where this machine has it; without QUIC where the system's TCP is quicker.

    libp2p takes QUIC where it can. That is quicker than TCP as Linux has it unless told otherwise, and far slower than
    TCP with BBR where packets get lost (``tests/benchmarks/internet.py --transports``).
    """
    try:
        has_bbr = _CONGESTION_CONTROL.read_text().startswith("bbr")
    except OSError:  # a sandbox that does not tell
        has_bbr = False
    return with_ipv6(PUBLIC[:1] if has_bbr else PUBLIC)


def with_ipv6(addresses: Sequence[str]) -> tuple[str, ...]:
    """The same, and every IPv6 network of this machine beside every IPv4 one, if it has any.

    :param addresses: multiaddresses at which a peer is to listen
    """
    others = [one.replace(_ALL_IPV4, _ALL_IPV6, 1) for one in addresses if one.startswith(_ALL_IPV4)]
    return (*addresses, *(others if has_ipv6() else ()))


def has_ipv6() -> bool:
    """Whether this machine has an IPv6 address at which others may reach it."""
    try:
        found = psutil.net_if_addrs()
    except OSError:  # a sandbox that does not tell
        return False
    addresses = (one.address for all_of_one in found.values() for one in all_of_one if one.family == AF_INET6)
    return not all(address == "::1" or address.startswith(_OF_ONE_LINK) for address in addresses)


def is_loopback(address: str) -> bool:
    """Whether only this machine itself can reach a multiaddress."""
    return address.startswith(("/ip4/127.", "/ip6/::1/"))


def is_of_one_link(address: str) -> bool:
    """Whether a multiaddress is one that each network has for itself; it says nothing without the interface."""
    return address.startswith(f"/ip6/{_OF_ONE_LINK}")


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
