"""Which addresses are those of one machine alone, and of which peer."""

from __future__ import annotations

from pathlib import Path
from socket import AF_INET, AF_INET6
from types import SimpleNamespace

import pytest

from hivenb.engine.network import addresses
from hivenb.engine.network.addresses import (
    LOOPBACK,
    PUBLIC,
    Reach,
    is_loopback,
    is_of_one_link,
    public_addresses,
    routes,
    with_ipv6,
)


@pytest.mark.parametrize("address", [*LOOPBACK, "/ip4/127.8.9.10/udp/4001/quic-v1", "/ip6/::1/tcp/4001/p2p/12D3KooW"])
def test_of_this_machine_alone(address: str) -> None:
    assert is_loopback(address)


@pytest.mark.parametrize(
    "address", [*PUBLIC, "/ip4/12.70.0.1/tcp/1", "/ip6/::11/tcp/1", "/ip6/fe80::1/tcp/1", "/dns/127.example.org/tcp/1"]
)
def test_of_a_network(address: str) -> None:
    assert not is_loopback(address)


@pytest.mark.parametrize(("control", "quic"), [("cubic\n", 1), ("reno\n", 1), ("bbr\n", 0), (None, 1)])
def test_quic_is_left_out_where_tcp_does_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, control: str | None, quic: int
) -> None:
    told = tmp_path / "tcp_congestion_control"
    if control is not None:
        told.write_text(control)
    monkeypatch.setattr(addresses, "_CONGESTION_CONTROL", told)
    monkeypatch.setattr(addresses, "has_ipv6", lambda: False)
    assert sum("quic" in address for address in public_addresses()) == quic
    assert PUBLIC[0] in public_addresses()


def interfaces(*found: str) -> dict[str, list[SimpleNamespace]]:
    """Of a machine with these addresses, as psutil tells them."""
    families = [(AF_INET6 if ":" in address else AF_INET, address) for address in found]
    return {"eth0": [SimpleNamespace(family=family, address=address) for family, address in families]}


@pytest.mark.parametrize(
    ("found", "is_there"),
    [
        (["127.0.0.1", "10.0.0.2"], False),
        (["::1", "10.0.0.2"], False),
        (["::1", "fe80::5054:ff:fe12:3456%eth0"], False),
        (["fe80::1%eth0", "2a01:4f8:c2c:1::1"], True),
        (["fd00::2"], True),
    ],
)
def test_ipv6_is_listened_on_where_others_can_reach_it(
    monkeypatch: pytest.MonkeyPatch, found: list[str], is_there: bool
) -> None:
    monkeypatch.setattr(addresses.psutil, "net_if_addrs", lambda: interfaces(*found))
    assert addresses.has_ipv6() is is_there
    ipv6 = ("/ip6/::/tcp/0", "/ip6/::/udp/0/quic-v1") if is_there else ()
    assert with_ipv6(PUBLIC) == PUBLIC + ipv6
    assert with_ipv6(LOOPBACK) == LOOPBACK


def test_addresses_that_each_link_has_for_itself_are_told_from_others() -> None:
    assert is_of_one_link("/ip6/fe80::1/tcp/1")
    assert not is_of_one_link("/ip6/2a01::fe80/tcp/1")


def test_whoever_is_connected_directly_as_well_is_so() -> None:
    direct, relayed = "/ip4/12.70.0.1/tcp/1", "/ip4/12.70.0.9/tcp/1/p2p/12D3KooWR/p2p-circuit"
    seen = [f"{relayed}/p2p/A", f"{direct}/p2p/A", f"{relayed}/p2p/B", f"{direct}/p2p/C", f"{relayed}/p2p/C"]
    assert routes(seen) == {"A": Reach.DIRECTLY, "B": Reach.RELAYED, "C": Reach.DIRECTLY}
    assert routes([]) == {}
