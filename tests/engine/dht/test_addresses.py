"""Which addresses are those of one machine alone, and of which peer."""

from __future__ import annotations

from pathlib import Path

import pytest

from hivenb.engine.dht import addresses
from hivenb.engine.dht.addresses import LOOPBACK, PUBLIC, Reach, is_loopback, public_addresses, routes


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
    assert sum("quic" in address for address in public_addresses()) == quic
    assert PUBLIC[0] in public_addresses()


def test_whoever_is_connected_directly_as_well_is_so() -> None:
    direct, relayed = "/ip4/12.70.0.1/tcp/1", "/ip4/12.70.0.9/tcp/1/p2p/12D3KooWR/p2p-circuit"
    seen = [f"{relayed}/p2p/A", f"{direct}/p2p/A", f"{relayed}/p2p/B", f"{direct}/p2p/C", f"{relayed}/p2p/C"]
    assert routes(seen) == {"A": Reach.DIRECTLY, "B": Reach.RELAYED, "C": Reach.DIRECTLY}
    assert routes([]) == {}
