"""Multiaddresses at which a DHT listens, and who can reach them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

#: This machine alone, at whichever port is free.
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)

#: Every network of this machine, at whichever ports are free.
PUBLIC = ("/ip4/0.0.0.0/tcp/0", "/ip4/0.0.0.0/udp/0/quic-v1")


def is_loopback(address: str) -> bool:
    """Whether only this machine itself can reach a multiaddress."""
    return address.startswith(("/ip4/127.", "/ip6/::1/"))


def one_each(addresses: Iterable[str]) -> list[str]:
    """The first address of each peer.

    :param addresses: multiaddresses, each with the id of its peer
    """
    first: dict[str, str] = {}
    for address in addresses:
        first.setdefault(address.rpartition("/p2p/")[2], address)
    return list(first.values())


def through_relays(initial_peers: Iterable[str]) -> dict[str, Any]:
    """Keyword arguments of a DHT that can be reached through those of its initial peers that relay.

    Its daemon asks them for a place once it has found out, through AutoNAT, that nobody reaches it otherwise.

    :param initial_peers: multiaddresses of the peers that it joins
    """
    return {"use_auto_relay": True, "trusted_relays": one_each(initial_peers)}
