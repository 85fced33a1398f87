"""In the DHT's process: how others reach this peer, which is found out before it joins them.

libp2p finds it out by itself (AutoNAT), some 15 seconds after the daemon has started; rounds fail meanwhile. Here, the
initial peers are asked to connect to this one, at the address from which it talks to them: a peer that they do not
reach asks those that relay for a place at once, or is a client.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.sharedctypes import RawArray
from typing import Any

from google.protobuf.wrappers_pb2 import UInt32Value
from hivemind.p2p import P2P, P2PContext, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.utils import get_logger
from hivemind.utils.multiaddr import Multiaddr

from hivenb.engine.network.addresses import CIRCUIT, Reach, is_loopback
from hivenb.engine.network.relays import has_place

logger = get_logger(__name__)

#: Seconds that an attempt to connect to a peer may take, and that its question may.
_DIALLED_WITHIN, _ANSWERED_WITHIN = 3.0, 6.0

#: Seconds that relays are given to have a place for a peer, and between two looks whether they have one.
_PLACE_WITHIN, _LOOK_EVERY = 10.0, 0.2

#: What both ends of a new connection say first (https://github.com/multiformats/multistream-select).
_GREETING = b"\x13/multistream/1.0.0\n"

_HANDLER = "hivenb.can_you_reach_me"

#: What an answer is the sum of.
_IS_REACHED, _IS_NOT_REACHED, _RELAYS = 1, 2, 4

#: What a question fails with whose answer is not known: no peer of ours, one that is gone, or does not let us in.
_NO_ANSWER = (P2PHandlerError, P2PDaemonError, ControlFailure, OSError, EOFError, TimeoutError, asyncio.TimeoutError)

#: Bytes for the addresses of relays.
_MOST_BYTES = 4096


@dataclass(frozen=True)
class Way:
    """In which others reach a peer.

    :param reach: how
    :param relays: multiaddresses of those that have a place for it
    """

    reach: Reach = Reach.UNKNOWN
    relays: tuple[str, ...] = ()

    @property
    def daemon(self) -> dict[str, Any]:
        """Keyword arguments that the daemon of such a peer is started with."""
        if self.reach is Reach.RELAYED:  # known: it does not wait until it has found out
            return {"force_reachability": "private", "use_auto_relay": True, "trusted_relays": list(self.relays)}
        return {"dht_mode": "client"} if self.reach is Reach.NOT else {}


class WayFound:
    """What the process of a DHT has found out, for its parent and for the process that comes after it."""

    def __init__(self) -> None:
        self._words = RawArray(ctypes.c_char, _MOST_BYTES)

    @property
    def way(self) -> Way:
        """In which others reach this peer."""
        reach, *relays = self._words.value.decode().split("\n")
        return Way(Reach(reach), tuple(relays))

    @way.setter
    def way(self, way: Way) -> None:
        words = "\n".join([way.reach.value, *way.relays]).encode()
        self._words.value = words if len(words) < _MOST_BYTES else way.reach.value.encode()


#: Starts the daemon of a peer that is reached in such a way; gives addresses of peers whom it can reach, too.
Start = Callable[[Way], Awaitable[tuple[Any, Any]]]


async def start_reachable(start: Start, initial_peers: Collection[str], is_walled: bool) -> tuple[Any, Any, Way]:
    """Start a daemon, and find out how others reach it.

    :param start: starts one; called again for a peer that nobody reaches
    :param initial_peers: multiaddresses of those who are asked
    :param is_walled: whether it is known that nobody reaches this machine by itself
    :returns: what that gave, and in which way others reach this peer
    """
    p2p, peers = await start(Way())
    answers = await _ask_all(p2p, initial_peers, is_walled)
    if _says(answers, _IS_NOT_REACHED) and not is_walled:
        answers = await _ask_all(p2p, initial_peers, is_walled)  # it may have been a busy moment
    if not is_walled and not _says(answers, _IS_NOT_REACHED):
        return p2p, peers, Way(Reach.DIRECTLY if _says(answers, _IS_REACHED) else Reach.UNKNOWN)
    silent = [address for address in initial_peers if answers[_peer_at(address)] is None]
    if silent and not _says(answers, _RELAYS):  # one of them may be the only relay
        answers |= await _ask_all(p2p, silent, is_walled)
    await p2p.shutdown()
    # one address each: the daemon waits until it knows as many relays as it was given addresses
    # and of a peer that is reached through one, the way to that one is its beginning
    ways = {_peer_at(address): address.partition(CIRCUIT)[0] for address in initial_peers}
    relays = {peer: way for peer, way in ways.items() if (answers[peer] or 0) & _RELAYS}
    if relays:
        relayed = Way(Reach.RELAYED, tuple(relays.values()))
        p2p, peers = await start(relayed)
        if await _is_given_a_place(p2p):
            return p2p, peers, relayed
        await p2p.shutdown()
    p2p, peers = await start(Way(Reach.NOT))
    return p2p, peers, Way(Reach.NOT)


async def answer_who_asks(p2p: P2P, relays: bool) -> None:
    """Tell others from now on whether this peer reaches them.

    Nobody is connected to but who asks, at the address that it has called from.

    :param relays: whether this peer has places for those whom nobody reaches
    """

    async def answer(port: UInt32Value, context: P2PContext) -> UInt32Value:
        hosts = await _hosts_of(p2p, context.remote_id) if port.value else set()
        tried = await asyncio.gather(*(_listens_at(host, port.value) for host in hosts))
        found = (_IS_REACHED if any(tried) else _IS_NOT_REACHED) if hosts else 0
        return UInt32Value(value=found + _RELAYS * relays)

    await p2p.add_protobuf_handler(_HANDLER, answer, UInt32Value)


def _says(answers: Mapping[PeerID, int | None], what: int) -> bool:
    return any((answer or 0) & what for answer in answers.values())


async def _ask_all(p2p: P2P, initial_peers: Iterable[str], is_walled: bool) -> dict[PeerID, int | None]:
    # nobody is to wait for an attempt that cannot succeed
    ports = {} if is_walled else _tcp_ports(await p2p.get_visible_maddrs(latest=True))
    peers = sorted({_peer_at(address) for address in initial_peers}, key=str)
    connected = await p2p.list_peers()
    answers = await asyncio.gather(*(ask(p2p, peer, _port_for(peer, connected, ports)) for peer in peers))
    return dict(zip(peers, answers, strict=True))


async def ask(p2p: P2P, peer: PeerID, port: int = 0) -> int | None:
    """Ask a peer whether it reaches this one.

    :param port: at which this one listens, for TCP; 0 to ask only whether it relays
    :returns: the sum of what it says; ``None`` if it does not answer
    """
    question = p2p.call_protobuf_handler(peer, _HANDLER, UInt32Value(value=port), UInt32Value)
    try:
        return int((await asyncio.wait_for(question, _ANSWERED_WITHIN)).value)
    except _NO_ANSWER as e:
        logger.debug(f"{peer} does not say whether it reaches this peer: {e!r}")
        return None


async def _is_given_a_place(p2p: P2P) -> bool:
    end = asyncio.get_running_loop().time() + _PLACE_WITHIN
    while not (is_given := await has_place(p2p)) and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(_LOOK_EVERY)
    return is_given


async def _hosts_of(p2p: P2P, peer: PeerID) -> set[str]:
    """Addresses from which a peer is connected, by itself and not through a relay."""
    found = [str(address) for one in await p2p.list_peers() if one.peer_id == peer for address in one.addrs]
    return {address.split("/")[2] for address in found if CIRCUIT not in address}


async def _listens_at(host: str, port: int) -> bool:
    """Whether a libp2p peer answers there."""
    try:
        return await asyncio.wait_for(_greets(host, port), _DIALLED_WITHIN)
    except (OSError, EOFError, ValueError, OverflowError, TimeoutError, asyncio.TimeoutError):
        return False


async def _greets(host: str, port: int) -> bool:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(_GREETING)
        return await reader.readexactly(len(_GREETING)) == _GREETING
    finally:
        writer.close()


def _peer_at(address: str) -> PeerID:
    return PeerID.from_base58(Multiaddr(address)["p2p"])


def _tcp_ports(addresses: Iterable[Any]) -> dict[str, int]:
    """At which this peer listens to others than this machine, by the kind of address, such as ``ip6``."""
    parts = [str(address).split("/") for address in addresses if not is_loopback(str(address))]
    return {one[1]: int(one[4]) for one in reversed(parts) if one[3] == "tcp"}  # the first of each


def _port_for(peer: PeerID, connected: Iterable[Any], ports: Mapping[str, int]) -> int:
    """The port of this peer at the address from which it talks to another one; 0 if it listens at none."""
    addresses = [str(address) for one in connected if one.peer_id == peer for address in one.addrs]
    kinds = [address.split("/")[1] for address in addresses if CIRCUIT not in address]
    return next((ports[kind] for kind in (*kinds, *ports) if kind in ports), 0)
