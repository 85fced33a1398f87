"""Multiaddresses at which a DHT listens, and who can reach them."""

from __future__ import annotations

#: This machine alone, at whichever port is free.
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)

#: Every network of this machine, at whichever ports are free.
PUBLIC = ("/ip4/0.0.0.0/tcp/0", "/ip4/0.0.0.0/udp/0/quic-v1")


def is_loopback(address: str) -> bool:
    """Whether only this machine itself can reach a multiaddress."""
    return address.startswith(("/ip4/127.", "/ip6/::1/"))
