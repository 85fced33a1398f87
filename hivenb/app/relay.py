"""``hivenb relay``: where peers meet, and through which those reach each other whom a firewall keeps apart."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hivemind
from hivemind.dht import DHTNode
from hivemind.p2p import PeerID

from hivenb.engine.dht.secret import Secret
from hivenb.errors import SwarmError
from hivenb.swarm.invite import decode_invite, encode_invite
from hivenb.swarm.swarm import Swarm

if TYPE_CHECKING:
    from hivenb.view.terminal import Terminal

#: Peers of one relay. libp2p's daemon asks none for a place before it has the choice of four, or has waited for three
#: minutes (go-libp2p, p2p/host/autorelay/options.go: minCandidates, bootDelay), and has no option for that.
PLACES = 4

_LOOK_EVERY = 5.0


@dataclass(frozen=True)
class RelaySettings:
    """Where a relay listens, and what it is known by.

    :param folder: for its secret and its keys, which are made if they are not there
    :param port: the first of :data:`PLACES` in a row, each for TCP and for UDP
    :param address: the machine's address to the others, if it cannot see it itself; empty if it can
    """

    folder: Path
    port: int
    address: str = ""

    def peer(self, number: int) -> dict[str, Any]:
        """How a swarm is opened that is one of the relay's peers.

        :param number: of it, from 0 on
        """
        ports = (f"tcp/{self.port + number}", f"udp/{self.port + number}/quic-v1")
        given: dict[str, Any] = {
            "public": True,
            "relay_service": True,
            "identity_path": self.folder / f"peer-{number + 1}.key",
            "host_maddrs": [f"/ip4/0.0.0.0/{port}" for port in ports],
        }
        if self.address:
            given["announce_maddrs"] = [f"{_protocol(self.address)}/{self.address}/{port}" for port in ports]
        return given


@contextmanager
def open_relay(settings: RelaySettings) -> Iterator[tuple[str, tuple[Swarm, ...]]]:
    """A relay that runs.

    :returns: its invite, and its peers
    :raises SwarmError: if it cannot be opened, a port is taken, or its folder cannot be used
    """
    for number in range(PLACES):
        _require_free(settings.port + number)
    secret = secret_in(settings.folder)
    swarms: list[Swarm] = []
    with ExitStack() as closing:
        for number in range(PLACES):
            first = swarms[0].addresses if swarms else None
            name = f"relay-{settings.port + number}"
            swarm = Swarm(name, **settings.peer(number), secret=secret, initial_peers=first)
            closing.callback(swarm.close)
            swarms.append(swarm)
        yield one_invite([swarm.invite for swarm in swarms]), tuple(swarms)


def one_invite(invites: Sequence[str]) -> str:
    """An invite with the addresses of several, by which all lead into the same swarm."""
    read = [decode_invite(invite) for invite in invites]
    return encode_invite([address for one in read for address in one.addresses], read[0].key)


def secret_in(folder: Path) -> Secret:
    """The secret in a folder; a new one if there is none, which nobody but this user can read.

    :raises SwarmError: if it can be neither read nor written
    """
    path = folder / "secret"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with suppress(FileNotFoundError):
            return Secret(path.read_text())
        secret = Secret.random()
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secret.reveal())
        return secret
    except OSError as e:
        raise SwarmError(
            f"the folder of the relay, {folder}, cannot be used: {e}; give another one with --folder"
        ) from e


def _require_free(port: int) -> None:
    """The daemon would do without an address at which it cannot listen, as long as there is another."""
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_INET, kind) as tried:
            if kind is socket.SOCK_STREAM:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what a relay has left behind just now
            try:
                tried.bind(("0.0.0.0", port))
            except OSError as e:
                raise SwarmError(f"port {port} is not to be had: {e}; give another first one with --port") from e


def run_relay(settings: RelaySettings, terminal: Terminal) -> None:
    """Open a relay, and say by which invite it is joined and who is there, until it is interrupted or terminated.

    :raises SwarmError: if it cannot be opened
    """
    is_over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: is_over.set())
    terminal.show("opening the relay ...")
    with open_relay(settings) as (invite, swarms):
        last = settings.port + PLACES - 1
        terminal.say(
            f"The relay listens at ports {settings.port} to {last}, for TCP and UDP. Its invite:\n\n{invite}\n"
        )
        terminal.say(
            "Whoever has it can join: hivenb.Swarm.join(invite). It stays good when the relay is started again with "
            f"{settings.folder}. Ctrl-C ends the relay."
        )
        while not is_over.wait(_LOOK_EVERY):
            terminal.show(_who_is_there(swarms))
    terminal.say("The relay has ended.")


def _who_is_there(swarms: Sequence[Swarm]) -> str:
    own = {swarm.peer_id for swarm in swarms}
    count = len(frozenset().union(*(connected_to(swarm) for swarm in swarms)) - own)
    return f"{count} peer{'' if count == 1 else 's'} connected"


def connected_to(swarm: Swarm) -> frozenset[str]:
    """Ids of the peers that a swarm's peer on this machine is connected to."""
    return frozenset(swarm.dht.run_coroutine(_connected))


async def _connected(dht: hivemind.DHT, node: DHTNode) -> list[str]:
    return [PeerID(peer.peer_id.to_bytes()).to_base58() for peer in await node.p2p.list_peers()]


def _protocol(address: str) -> str:
    with suppress(ValueError):
        return f"/ip{ipaddress.ip_address(address).version}"
    return "/dns"
