"""Which addresses are those of one machine alone."""

from __future__ import annotations

import pytest

from hivenb.engine.dht.addresses import LOOPBACK, PUBLIC, is_loopback


@pytest.mark.parametrize("address", [*LOOPBACK, "/ip4/127.8.9.10/udp/4001/quic-v1", "/ip6/::1/tcp/4001/p2p/12D3KooW"])
def test_of_this_machine_alone(address: str) -> None:
    assert is_loopback(address)


@pytest.mark.parametrize(
    "address", [*PUBLIC, "/ip4/12.70.0.1/tcp/1", "/ip6/::11/tcp/1", "/ip6/fe80::1/tcp/1", "/dns/127.example.org/tcp/1"]
)
def test_of_a_network(address: str) -> None:
    assert not is_loopback(address)
