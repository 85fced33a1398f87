"""In the DHT's process: how others reach this peer, which is found out before it joins them.

libp2p finds it out by itself (AutoNAT), some 15 seconds after the daemon has started; rounds fail meanwhile. Here, the
initial peers are asked to connect to this one, at the address from which it talks to them: a peer that they do not
reach asks those that relay for a place at once, or is a client.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.sharedctypes import RawArray
from typing import Any

from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet
from google.protobuf.wrappers_pb2 import UInt32Value
from hivemind.p2p import P2P, P2PContext, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.utils import get_logger
from hivemind.utils.multiaddr import Multiaddr

from hivenb.engine.network.addresses import CIRCUIT, LOOPBACK, Reach, is_loopback

# -- relaying --------------------------------------------------------------------------------------------------------
#
# Relays in the sense of libp2p: starts a daemon that is one, asks for places at them, and sees that a place is kept.
#
# A circuit relay, version 2: https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md


logger = get_logger(__name__)

#: Of each connection that a relay passes on: bytes each way, and for how long. The daemon's own 4 GiB and half an hour
#: end the connections of a training in the middle of it; a model of 10^8 parameters sends 2 GB in ten epochs.
RELAYED_BYTES, RELAYED_FOR = 1 << 40, "168h"

#: Connections that a relay passes on at a time for each peer, and bytes of the buffer of each.
_CIRCUITS, _BUFFER = 128, 1 << 18

#: Places at a relay, of all together. One that was given counts for half an hour, also when its peer has gone at once
#: (go-libp2p, p2p/protocol/circuitv2/relay/constraints.go): too few, and a stranger could take them all.
_PLACES = 1 << 20

RELAY_ARGUMENTS: dict[str, Any] = {
    "relayService": True,
    "relayDataLimit": RELAYED_BYTES,
    "relayTimeLimit": RELAYED_FOR,
    "relayMaxCircuits": _CIRCUITS,
    "relayBufferSize": _BUFFER,
    "relayMaxReservations": _PLACES,
}

_HOP = "/libp2p/circuit/relay/0.2.0/hop"

#: A request for a place, with its length before it.
_RESERVE = bytes([2, 8, 0])

#: Fields of the answer, and of the limit in it.
_LIMIT, _DATA = 4, 2

#: Seconds that a relay is given to answer, and starts until one has the limits that it was asked to have.
_ANSWERS_WITHIN, _MOST_STARTS = 5.0, 20

#: Seconds from one look at the own place to the next, and for which one without a place is connected to a relay before
#: it begins anew: the daemon itself asks no relay again for an hour that it has asked before.
_LOOK_AGAIN_EVERY, _LOST_AFTER = 5.0, 15.0

_TROUBLE = (P2PDaemonError, ControlFailure, OSError, EOFError, TimeoutError, asyncio.TimeoutError)


async def start_relay(start: Callable[[], Awaitable[tuple[Any, Any]]], listens_at: Iterable[str]) -> tuple[Any, Any]:
    """Start a daemon until it relays as it was asked to.

    hivemind's daemon sets up two relays, one of them with libp2p's own limits of 128 KiB and two minutes, and whichever
    comes last is the one (go-libp2p-daemon, p2pd/main.go: EnableRelayV2 beside EnableRelayService).

    :param start: starts it, and gives more beside it
    :param listens_at: multiaddresses at which it was told to listen
    :returns: what that gave
    :raises P2PDaemonError: if it does not relay so after many starts
    """
    for _ in range(_MOST_STARTS):
        p2p, further = await start()
        here = _on_this_machine([*map(str, await p2p.get_visible_maddrs()), *listens_at])
        limit = await _limit_of(p2p.peer_id, here)
        if limit is None or limit >= RELAYED_BYTES:  # 0 is none at all
            return p2p, further
        logger.debug(f"The daemon relays {limit} bytes for each connection; it is started again")
        await p2p.shutdown()
        await p2p._child.wait()  # the next one listens where it does
    raise P2PDaemonError(f"the daemon relays {limit} bytes and no more, however often it is started")


async def _limit_of(relay: PeerID, addresses: Sequence[str]) -> int | None:
    """How many bytes a relay of this machine passes on of a connection; ``None`` if there is no limit.

    :raises P2PDaemonError: if it cannot be asked
    """
    asking = await P2P.create(host_maddrs=list(LOOPBACK), nat_port_map=False, auto_nat=False, use_relay=True)
    try:
        await asking._client.connect(relay, [Multiaddr(address) for address in addresses])
        return await asyncio.wait_for(_ask_for_place(asking, relay), _ANSWERS_WITHIN)
    except _TROUBLE as e:
        raise P2PDaemonError(f"the daemon does not relay: {e!r}") from e
    finally:
        await asking.shutdown()


async def _ask_for_place(p2p: P2P, relay: PeerID) -> int | None:
    _, reader, writer = await p2p._client.stream_open(relay, [_HOP])
    try:
        writer.write(_RESERVE)
        length = await _read_varint(reader)
        answer = _fields(await reader.readexactly(length))
    finally:
        writer.close()
    return _fields(answer[_LIMIT]).get(_DATA, 0) if _LIMIT in answer else None


async def has_place(p2p: P2P) -> bool:
    """Whether a peer can be reached through a relay."""
    return any(CIRCUIT in str(address) for address in await p2p.get_visible_maddrs(latest=True))


async def keep_place(p2p: P2P, relays: Iterable[str]) -> None:
    """Look again and again whether a peer still has its place at a relay, and end its daemon if it has lost that.

    As when the relay was started again. The daemon is started anew then, as the same peer, and asks at once.

    :param relays: multiaddresses of those who were asked for one
    """
    ids = {PeerID.from_base58(Multiaddr(address)["p2p"]) for address in relays}
    lost_for = 0.0
    while lost_for < _LOST_AFTER:
        await asyncio.sleep(_LOOK_AGAIN_EVERY)
        with suppress(*_TROUBLE):
            is_lost = ids & {one.peer_id for one in await p2p.list_peers()} and not await has_place(p2p)
            lost_for = lost_for + _LOOK_AGAIN_EVERY if is_lost else 0.0
    logger.info("This peer has lost its place at the relay, and asks for another one")
    p2p._child.terminate()


def _on_this_machine(addresses: Iterable[str]) -> list[str]:
    """At which a daemon can be reached from its own machine, whatever others are told."""
    parts = [address.split("/") for address in addresses if "/tcp/" in address and "/tcp/0" not in address]
    return [f"/ip4/127.0.0.1/tcp/{one[one.index('tcp') + 1]}" for one in parts if one[1] != "ip6"]


async def _read_varint(reader: asyncio.StreamReader) -> int:
    number = shift = 0
    while True:
        (byte,) = await reader.readexactly(1)
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return number


def _fields(message: bytes) -> dict[int, Any]:
    """Of a message of protobuf, by their numbers."""
    return {one.field_number: one.data for one in UnknownFieldSet(Empty.FromString(message))}


# -- reachability ----------------------------------------------------------------------------------------------------


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
    answers = await _ask_all(p2p, initial_peers)
    if _says(answers, _IS_NOT_REACHED) and not is_walled:
        answers = await _ask_all(p2p, initial_peers)  # it may have been a busy moment
    if not is_walled and not _says(answers, _IS_NOT_REACHED):
        return p2p, peers, Way(Reach.DIRECTLY if _says(answers, _IS_REACHED) else Reach.UNKNOWN)
    await p2p.shutdown()
    # one address each: the daemon waits until it knows as many relays as it was given addresses
    relays = {_peer_at(address): address for address in initial_peers if answers[_peer_at(address)] & _RELAYS}
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


def _says(answers: Mapping[PeerID, int], what: int) -> bool:
    return any(answer & what for answer in answers.values())


async def _ask_all(p2p: P2P, initial_peers: Iterable[str]) -> dict[PeerID, int]:
    ports = _tcp_ports(await p2p.get_visible_maddrs(latest=True))
    peers = sorted({_peer_at(address) for address in initial_peers}, key=str)
    connected = await p2p.list_peers()
    answers = await asyncio.gather(*(ask(p2p, peer, _port_for(peer, connected, ports)) for peer in peers))
    return dict(zip(peers, answers, strict=True))


async def ask(p2p: P2P, peer: PeerID, port: int = 0) -> int:
    """Ask a peer whether it reaches this one.

    :param port: at which this one listens, for TCP; 0 to ask only whether it relays
    :returns: the sum of what it says; 0 if it says nothing
    """
    question = p2p.call_protobuf_handler(peer, _HANDLER, UInt32Value(value=port), UInt32Value)
    try:
        return int((await asyncio.wait_for(question, _ANSWERED_WITHIN)).value)
    except _NO_ANSWER as e:
        logger.debug(f"{peer} does not say whether it reaches this peer: {e!r}")
        return 0


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
