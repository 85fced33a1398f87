"""``hivenb relay``: the same one when it is started again, with the same invite and the same people out."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest
from app.test_cli import HIVENB, gone, running, running_forked

import hivenb
from hivenb.app.relay import RelaySettings, _is_public, connected_to, open_relay, secret_in
from hivenb.errors import SwarmError
from hivenb.swarm.invite import read_invite
from hivenb.swarm.start import read_settings


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


@pytest.mark.parametrize("content", [b"short", b"\xff" * 64])
def test_a_file_that_holds_no_secret_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "secret").write_bytes(content)
    with pytest.raises(SwarmError, match=r"/secret holds no secret .*remove it"):
        secret_in(tmp_path)


@pytest.mark.parametrize(
    ("address", "announced"),
    [
        ("203.0.113.5", "/ip4/203.0.113.5/tcp/4001"),
        ("2001:db8::1", "/ip6/2001:db8::1/tcp/4001"),
        ("relay.example.org", "/dns/relay.example.org/tcp/4001"),
    ],
)
def test_it_listens_wherever_it_is_announced(tmp_path: Path, address: str, announced: str) -> None:
    given = RelaySettings(tmp_path, 4001, address).swarm
    assert {"/ip4/0.0.0.0/tcp/4001", "/ip4/0.0.0.0/udp/4001/quic-v1", "/ip6/::/tcp/4001"} < set(given["host_maddrs"])
    assert given["announce_maddrs"][0] == announced
    assert "announce_maddrs" not in RelaySettings(tmp_path, 4001).swarm, "it sees its addresses itself"
    assert given["public"]


@pytest.mark.parametrize(("address", "prefix"), [("127.0.0.1", "/ip4/127.0.0.1/"), ("::1", "/ip6/::1/")])
def test_at_an_address_of_this_machine_alone_it_listens_nowhere_else(tmp_path: Path, address: str, prefix: str) -> None:
    settings = read_settings({**RelaySettings(tmp_path, 4001, address).swarm})
    assert all(given.startswith(prefix) for given in settings.host_maddrs)
    assert settings.host_maddrs
    assert not settings.is_on_network, "it would look for a router that lets others in"


@pytest.mark.parametrize(
    ("address", "is_public"),
    [
        ("/ip4/192.168.1.2/tcp/1", False),
        ("/ip4/100.64.0.1/tcp/1", False),
        ("/ip6/fd00::1/tcp/1", False),
        ("/ip4/51.77.0.1/tcp/1", True),
        ("/dns/relay.example.org/tcp/1", True),
    ],
)
def test_which_addresses_others_can_know(address: str, is_public: bool) -> None:
    assert _is_public(address) is is_public


def a_port() -> int:
    return 20000 + os.getpid() % 20000


@pytest.mark.process
@pytest.mark.slow
def test_a_relay_is_the_same_one_again_and_who_is_out_stays_out(tmp_path: Path) -> None:
    settings = RelaySettings(tmp_path / "relay", a_port())
    arguments = ["relay", "--port", str(settings.port), "--folder", str(settings.folder)]
    with running_forked(arguments, tmp_path) as relay:
        invite = relay.wait_for(r"hivenb://\S+", 90)[0]
        (peer,) = {address.rpartition("/p2p/")[2] for address in read_invite(invite).addresses}
        with hivenb.Swarm.join(invite, "guest") as guest:
            assert guest.is_private
            assert not guest.can_ban
            assert peer in connected_to(guest)
            relay.wait_for("1 peer connected", 30)
        opened = {"initial_peers": read_invite(invite).addresses, "secret": secret_in(settings.folder)}
        # by an invite of its own: whoever has come by the same one is out, too
        with hivenb.Swarm("host", **opened) as host, hivenb.Swarm.join(host.invite, "another guest") as out:
            host.ban(out.peer_id)
        end = time.monotonic() + 60
        while not (settings.folder / "ban-list").exists():
            assert time.monotonic() < end, relay.output
            time.sleep(0.1)
        family = relay.family()
        relay.interrupt()
        assert relay.wait(30) == 0, relay.output
        assert "The relay has ended" in relay.output
        assert gone(family, 10)
    with open_relay(settings) as again:
        assert again.peer_id == peer
        assert again.banned == (out.peer_id,), "though there is nobody who could have told it"
        with hivenb.Swarm.join(invite, "guest") as guest:
            assert peer in connected_to(guest)


@pytest.mark.process
@pytest.mark.slow
def test_on_this_machine_alone_no_socket_can_be_reached_from_elsewhere_and_it_ends_with_all_it_has_started(
    tmp_path: Path,
) -> None:
    """However often it is told to end, as a service may be: whoever ends it tells its children, too."""
    command = [*HIVENB, "relay", "--port", str(a_port() + 1), "--folder", str(tmp_path), "--address", "127.0.0.1"]
    with running(command, tmp_path) as relay:
        invite = relay.wait_for(r"hivenb://\S+", 90)[0]
        relay.wait_for("listens on this machine alone", 30)
        with hivenb.Swarm.join(invite, "guest") as guest:
            assert guest.is_private
            relay.wait_for("1 peer connected", 30)
            sockets = [one for process in relay.family() for one in process.net_connections("inet")]
        assert {one.laddr.port for one in sockets} >= {a_port() + 1}
        assert {one.laddr.ip for one in sockets if one.laddr} <= {"127.0.0.1", "::1"}

        relay.wait_for("Ctrl-C ends the relay", 90)
        family = relay.family()
        for _ in range(20):
            os.kill(relay.process.pid, signal.SIGTERM)
        os.killpg(relay.process.pid, signal.SIGTERM)
        assert relay.wait(60) == 0, relay.output
        assert gone(family, 10)


def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        refused = pytest.raises(SwarmError, match=f"port {port} is not to be had")
        with refused, open_relay(RelaySettings(tmp_path, port)):
            pass
