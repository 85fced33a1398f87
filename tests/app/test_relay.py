"""``hivenb relay``: one invite to several peers, which are the same ones when it is started again."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest
from app.test_cli import HIVENB, gone, running

import hivenb
from hivenb.app.relay import PLACES, RelaySettings, connected_to, one_invite, secret_in
from hivenb.engine.dht.passes import Authority
from hivenb.engine.dht.secret import Secret
from hivenb.errors import SwarmError
from hivenb.swarm.invite import encode_invite, read_invite

IDS = ("12D3KooWPjceQrSwdWXPyLLeABRXmuqt69Rg3sBYbU1Nft9HyQ6X", "12D3KooWRBhwfeP2Y4TCx1SM6s9rUoHhR5STiGwxBhgFRcw3UERE")
KEY = Authority(Secret.random()).new_invite()


def test_the_secret_of_a_folder_is_made_once_and_is_its_owners(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "relay"
    secret = secret_in(folder)
    assert secret_in(folder) == secret
    assert (folder / "secret").stat().st_mode & 0o777 == 0o600


def test_a_folder_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        SwarmError, match=r"the folder of the relay, .*cannot be used: .*give another one with --folder"
    ):
        secret_in(tmp_path / "file" / "relay")


@pytest.mark.parametrize(
    ("address", "announced"),
    [
        ("203.0.113.5", "/ip4/203.0.113.5/tcp/4003"),
        ("2001:db8::1", "/ip6/2001:db8::1/tcp/4003"),
        ("relay.example.org", "/dns/relay.example.org/tcp/4003"),
    ],
)
def test_each_peer_has_a_port_and_a_key_of_its_own(tmp_path: Path, address: str, announced: str) -> None:
    given = RelaySettings(tmp_path, 4001, address).peer(2)
    assert given["host_maddrs"] == ["/ip4/0.0.0.0/tcp/4003", "/ip4/0.0.0.0/udp/4003/quic-v1"]
    assert given["announce_maddrs"][0] == announced
    assert given["identity_path"] == tmp_path / "peer-3.key"
    assert "announce_maddrs" not in RelaySettings(tmp_path, 4001).peer(0), "it sees its addresses itself"


def test_one_invite_leads_to_all_of_them() -> None:
    addresses = [f"/ip4/203.0.113.5/tcp/{4001 + number}/p2p/{peer}" for number, peer in enumerate(IDS)]
    invite = read_invite(one_invite([encode_invite([address], KEY) for address in addresses]))
    assert (list(invite.addresses), invite.key) == (addresses, KEY)


@pytest.mark.process
def test_a_relay_is_joined_by_its_invite_and_is_the_same_one_again(tmp_path: Path) -> None:
    arguments = [*HIVENB, "relay", "--port", str(20000 + os.getpid() % 20000), "--folder", str(tmp_path / "relay")]
    peers = set()
    for _ in range(2):
        with running(arguments, tmp_path) as relay:
            invite = relay.wait_for(r"hivenb://\S+", 90)[0]
            addresses = read_invite(invite).addresses
            peers.add(frozenset(re.findall(r"/p2p/(\w+)", " ".join(addresses))))
            with hivenb.Swarm.join(invite, "guest") as guest:
                assert guest.is_private
                assert not guest.can_show_the_door
                assert connected_to(guest) & set().union(*peers)
                relay.wait_for("1 peer connected", 30)
            family = relay.family()
            relay.interrupt()
            assert relay.wait(30) == 0, relay.output
            assert "The relay has ended" in relay.output
            assert gone(family, 10)
    (ids,) = peers
    assert len(ids) == PLACES


@pytest.mark.process
def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with running([*HIVENB, "relay", "--port", str(port), "--folder", str(tmp_path)], tmp_path) as relay:
            assert relay.wait(90) == 1
            assert f"hivenb: port {port} is not to be had" in relay.output
