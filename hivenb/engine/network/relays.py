"""Relays in the sense of libp2p: starts a daemon that is one, asks for places at them, and sees that a place is kept.

A circuit relay, version 2: https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from multiprocessing.sharedctypes import RawValue
from typing import Any

from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet
from hivemind.p2p import P2P, P2PDaemonError, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.utils import get_logger
from hivemind.utils.multiaddr import Multiaddr

from hivenb.engine.network.addresses import CIRCUIT, LOOPBACK

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

#: Seconds that a relay is given to answer, and starts until one has the limits that it was asked to have: on a machine
#: where all cores are busy, one of four has them.
_ANSWERS_WITHIN, _MOST_STARTS = 5.0, 60

#: Seconds from one look at the own place to the next, and for which one without a place is connected to a relay before
#: it begins anew: the daemon itself asks no relay again for an hour that it has asked before. Each time, so many times
#: as long: the daemon is started anew some times within a minute, and no more.
_LOOK_AGAIN_EVERY, _LOST_AFTER, _TIMES_AS_LONG, _LONGEST = 5.0, 15.0, 4, 1800.0

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


class LostPlaces:
    """How often in a row a daemon was ended since it had no place at a relay. For one process after the other."""

    def __init__(self) -> None:
        self._in_a_row = RawValue(ctypes.c_int, 0)

    @property
    def in_a_row(self) -> int:
        """How often, since it last had one."""
        return int(self._in_a_row.value)

    @in_a_row.setter
    def in_a_row(self, count: int) -> None:
        self._in_a_row.value = count

    @property
    def patience(self) -> float:
        """Seconds without a place after which the daemon is to ask anew."""
        return min(_LOST_AFTER * float(_TIMES_AS_LONG**self.in_a_row), _LONGEST)


async def keep_place(p2p: P2P, relays: Iterable[str], lost: LostPlaces) -> None:
    """Look again and again whether a peer still has its place at a relay, and end its daemon if it has lost that.

    As when the relay was started again. The daemon is started anew then, as the same peer, and asks at once.

    :param relays: multiaddresses of those who were asked for one
    :param lost: how often that was so in a row: a relay that has no place for a while is asked more and more seldom
    """
    ids = {PeerID.from_base58(Multiaddr(address)["p2p"]) for address in relays}
    lost_for = 0.0
    while lost_for < lost.patience:
        await asyncio.sleep(_LOOK_AGAIN_EVERY)
        with suppress(*_TROUBLE):
            is_placed = await has_place(p2p)
            lost.in_a_row *= not is_placed
            is_lost = ids & {one.peer_id for one in await p2p.list_peers()} and not is_placed
            lost_for = lost_for + _LOOK_AGAIN_EVERY if is_lost else 0.0
    lost.in_a_row += 1
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
