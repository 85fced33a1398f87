"""``hivenb relay``: where peers meet, and through which those reach each other whom a firewall keeps apart."""

from __future__ import annotations

import concurrent.futures
import ipaddress
import os
import select
import signal
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hivemind
from hivemind.dht import DHTNode
from hivemind.p2p import PeerID

from hivenb.engine.network.access.tokens import Secret
from hivenb.errors import SwarmError
from hivenb.swarm.swarm import Swarm

if TYPE_CHECKING:
    from hivenb.view.terminal import Terminal

#: Seconds from one look at who is there to the next, and that the DHT is given to tell.
_LOOK_EVERY = 5.0


@dataclass(frozen=True)
class RelaySettings:
    """Where a relay listens, and what it is known by.

    :param folder: for its secret, its key and the ban list, which are made if they are not there
    :param port: for TCP and for UDP
    :param address: the machine's address or name to the others, if it cannot see it itself; empty if it can. With one
      that only this machine can reach, such as 127.0.0.1, the relay listens there and nowhere else
    """

    folder: Path
    port: int
    address: str = ""

    @property
    def swarm(self) -> dict[str, Any]:
        """How the relay's swarm is opened."""
        given: dict[str, Any] = {"relay_service": True, "identity_path": self.folder / "peer.key"}
        if self.is_of_this_machine:
            return {**given, "host_maddrs": self._at(self.address)}
        if self.address:
            given["announce_maddrs"] = self._at(self.address)
        return {**given, "public": True, "host_maddrs": [*self._at("0.0.0.0"), *self._at("::")]}

    @property
    def is_of_this_machine(self) -> bool:
        """Whether nobody else can reach it, as it was told to."""
        with suppress(ValueError):
            return ipaddress.ip_address(self.address).is_loopback
        return False

    def _at(self, address: str) -> list[str]:
        where = f"/{_protocol(address)}/{address}"
        return [f"{where}/tcp/{self.port}", f"{where}/udp/{self.port}/quic-v1"]


@contextmanager
def open_relay(settings: RelaySettings) -> Iterator[Swarm]:
    """A relay that runs.

    :raises SwarmError: if it cannot be opened, its port is taken, or its folder cannot be used
    """
    _require_free(settings.port)
    secret = secret_in(settings.folder)
    with Swarm(f"relay-{settings.port}", **settings.swarm, secret=secret) as swarm:
        if signed := _read(settings.folder / "ban-list"):
            swarm.dht.run_coroutine(partial(_take, signed))  # who was banned before the relay was started again
        yield swarm


def secret_in(folder: Path) -> Secret:
    """The secret in a folder; a new one if there is none, which nobody but this user can read.

    :raises SwarmError: if it can be neither read nor written, or is none
    """
    path = folder / "secret"
    if given := _read(path):
        try:
            return Secret(given.decode())
        except (SwarmError, UnicodeDecodeError) as e:
            raise SwarmError(f"{path} holds no secret ({e}); remove it, and the relay has a new one") from e
    secret = Secret.random()
    _write(path, secret.reveal().encode())
    return secret


def run_relay(settings: RelaySettings, terminal: Terminal) -> None:
    """Open a relay, and say by which invite it is joined and who is there, until it is interrupted or terminated.

    :raises SwarmError: if it cannot be opened
    """
    told_to_end = _signals()
    terminal.show("opening the relay ...")
    with open_relay(settings) as swarm:
        terminal.say(f"The relay listens at port {settings.port}, for TCP and UDP. Its invite:\n\n{swarm.invite}\n")
        if settings.is_of_this_machine:
            terminal.say("It listens on this machine alone, so that nobody else can join.\n")
        elif not any(map(_is_public, swarm.addresses)):
            terminal.say(
                "None of the addresses in it is public, so that only those can join who are in the same network. If "
                "others know this machine by another address or name, give that with --address.\n"
            )
        terminal.say(
            "Whoever has it can join: hivenb.Swarm.join(invite). It stays good when the relay is started again with "
            f"{settings.folder}. Ctrl-C ends the relay."
        )
        while not select.select([told_to_end], [], [], _LOOK_EVERY)[0]:
            terminal.show(_look(swarm, settings.folder))
    terminal.say("The relay has ended.")


def _signals() -> int:
    """A descriptor that can be read from the first interrupt or request to end on; neither does anything else.

    An event would lock itself out where the second of two comes while the first one sets it.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)  # one is enough

    def note(*_: object) -> None:
        with suppress(BlockingIOError):
            os.write(writer, b"!")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
    return reader


def connected_to(swarm: Swarm) -> frozenset[str]:
    """Ids of the peers that a swarm's peer on this machine is connected to.

    :raises SwarmError: if that is not known in time
    """
    try:
        return frozenset(swarm.dht.run_coroutine(_connected, return_future=True).result(_LOOK_EVERY))
    except (concurrent.futures.TimeoutError, TimeoutError) as e:
        raise SwarmError(f"the DHT does not answer within {_LOOK_EVERY:.0f} s") from e
    except Exception as e:  # of several libraries, while the daemon ends and is started anew
        raise SwarmError(f"it cannot be seen who is connected: {e!r}") from e


def _look(swarm: Swarm, folder: Path) -> str:
    """Who is there, in words; remembers who is banned, as the relay may be the only one left that knows.

    :raises SwarmError: if the DHT has ended for good
    """
    ban_list = swarm.dht.ban_list
    try:
        if ban_list is not None and ban_list.signed and ban_list.signed != _read(folder / "ban-list"):
            _write(folder / "ban-list", ban_list.signed)
        count = len(connected_to(swarm))
    except SwarmError as e:  # may pass
        return str(e)
    return f"{count} peer{'' if count == 1 else 's'} connected"


async def _take(signed: bytes, dht: hivemind.DHT, node: DHTNode) -> None:
    dht.ban_list.take(signed)


async def _connected(dht: hivemind.DHT, node: DHTNode) -> list[str]:
    return [PeerID(peer.peer_id.to_bytes()).to_base58() for peer in await node.p2p.list_peers()]


def _require_free(port: int) -> None:
    """The daemon would do without an address at which it cannot listen, as long as there is another."""
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_INET, kind) as tried:
            if kind is socket.SOCK_STREAM:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what a relay has left behind just now
            try:
                tried.bind(("0.0.0.0", port))
            except OSError as e:
                raise SwarmError(f"port {port} is not to be had: {e}; give another one with --port") from e


def _read(path: Path) -> bytes:
    """What is in a file of the relay's folder; nothing if it is not there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with suppress(FileNotFoundError):
            return path.read_bytes()
    except OSError as e:
        raise _unusable(path.parent, e) from e
    return b""


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all, and for nobody but this user."""
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except OSError as e:
        raise _unusable(path.parent, e) from e


def _unusable(folder: Path, error: OSError) -> SwarmError:
    return SwarmError(f"the folder of the relay, {folder}, cannot be used: {error}; give another one with --folder")


def _protocol(address: str) -> str:
    with suppress(ValueError):
        return f"ip{ipaddress.ip_address(address).version}"
    return "dns"


def _is_public(address: str) -> bool:
    parts: Sequence[str] = address.split("/")
    with suppress(ValueError):
        return ipaddress.ip_address(parts[2]).is_global
    return True  # a name
