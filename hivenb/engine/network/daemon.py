"""libp2p's daemon, through which a peer talks to all others: how it is started, and what is known when it has ended."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from multiprocessing.sharedctypes import RawArray
from typing import Any, ClassVar

import hivemind
from hivemind.averaging.partition import DEFAULT_PART_SIZE_BYTES
from hivemind.dht import DHTNode
from hivemind.p2p import P2P, P2PContext, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerInfo
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure, raise_if_failed, read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2
from hivemind.utils import get_logger
from hivemind.utils.multiaddr import Multiaddr

from hivenb.engine.network.access.ban_list import SharedBanList
from hivenb.engine.network.access.guard import AdmissionStatus, Guard
from hivenb.engine.network.access.guarded_client import GuardedClient, WatchfulClient
from hivenb.engine.network.access.identity import identity_file, same_ports
from hivenb.engine.network.access.streams import OpenStreams, StreamHandler
from hivenb.engine.network.access.tokens import Membership
from hivenb.engine.network.addresses import is_loopback
from hivenb.engine.network.node import caller
from hivenb.engine.network.relays import RELAY_ARGUMENTS
from hivenb.engine.process.child import tied_to_parent
from hivenb.engine.process.socket_folder import socket_folder

# -- blocked peers ---------------------------------------------------------------------------------------------------
#
# Peers that a person has blocked: nothing of theirs is answered, and nothing is asked of them.


#: How many a person can block.
MOST_BLOCKED = 256

#: Bytes for an id; those of libp2p have up to 42.
_SLOT = 64


class BlockedPeers:
    """Ids of blocked peers, which all processes see that are forked later. One process writes."""

    def __init__(self) -> None:
        self._slots = RawArray(ctypes.c_char, MOST_BLOCKED * _SLOT)

    @property
    def all(self) -> frozenset[bytes]:
        """Their ids."""
        raw = self._slots.raw
        slots = (raw[start : start + _SLOT] for start in range(0, len(raw), _SLOT))
        return frozenset(slot[1 : 1 + slot[0]] for slot in slots if slot[0])

    def __contains__(self, peer: PeerID) -> bool:
        return bool(self._slots.raw[0]) and peer.to_bytes() in self.all

    def replace(self, peers: frozenset[bytes]) -> None:
        """Block these, and no others.

        :raises ValueError: if they are too many
        """
        if len(peers) > MOST_BLOCKED:
            raise ValueError(f"no more than {MOST_BLOCKED} peers can be blocked")
        written = b"".join(bytes([len(peer)]) + peer.ljust(_SLOT - 1, b"\0") for peer in sorted(peers))
        self._slots.raw = written.ljust(MOST_BLOCKED * _SLOT, b"\0")


async def greet(peer: PeerID, dht: hivemind.DHT, node: DHTNode) -> None:
    """In the DHT's process: know a peer again that was blocked, and be known to it; each has struck the other off."""
    await node.protocol.call_ping(peer)


# -- listening peers -------------------------------------------------------------------------------------------------
#
# Where connected peers listen, which their connections do not show: they dial from other ports.


#: Nanoseconds that the daemon is given. It knows of all who are connected; one that has just gone it would look for.
_ANSWERS_WITHIN = 10**9


# -- message limits --------------------------------------------------------------------------------------------------
#
# How long a message of another peer may be: one that is longer is refused before it is read.


logger = get_logger(__name__)

#: How many times as long as a part of a tensor a message may be: parts are cut by what a codec is expected to make of
#: them, and another one may make up to four times as much.
MARGIN = 4

#: Bytes that a message may always have; libp2p's daemon allows as many for a request that is no stream.
SHORTEST_LIMIT = 4 * 1024**2


def limit_for(part_size_bytes: int | None) -> int:
    """Bytes that a message may have where tensors are cut into parts of a size.

    :param part_size_bytes: hivemind's own if ``None``
    """
    return max(SHORTEST_LIMIT, MARGIN * (part_size_bytes or DEFAULT_PART_SIZE_BYTES))


class RequestTooLongError(asyncio.IncompleteReadError):
    """A peer wanted to send more than it may; taken for the end of its stream."""


class BoundedReader:
    """What reads a stream, and nothing that is too long.

    :param reader: of the stream
    :param check: called with the bytes that are to be read next; raises if they are too many
    """

    def __init__(self, reader: asyncio.StreamReader, check: Callable[[int], None]):
        self._reader, self._check = reader, check

    async def readexactly(self, count: int) -> bytes:
        """As the stream's own method, after the check."""
        self._check(count)
        return await self._reader.readexactly(count)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


# -- daemon ----------------------------------------------------------------------------------------------------------


#: Seconds for each attempt to reach a peer that was there before.
_REACHED_WITHIN = 3.0

#: Lets a daemon dial from a port of its own choice, and not from the one at which it listens. Two that dial each other
#: within the time that a packet takes would have one connection that both have begun (a simultaneous open; RFC 9293,
#: section 3.5). It fails, and both refuse to dial again for six seconds: on a line of 100 ms, peers that had come
#: together did not know each other for some epochs (go-libp2p, p2p/transport/tcp).
_DIALS_FROM_ANY_PORT = "LIBP2P_TCP_REUSEPORT=false"


class Relaying(Enum):
    """What a daemon passes on between others that cannot reach each other (a circuit relay, version 2).

    https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md
    """

    NOTHING = "nothing"
    A_LITTLE = "as plain hivemind does, within its limits"
    ALL = "all that peers in training send each other"


@dataclass(frozen=True)
class Admission:
    """Who is let in.

    :param membership: of this peer in a private swarm, whose members alone are let in; ``None`` to let all in
    :param relaying: what to pass on between others
    :param ban_list: who is banned from a private swarm
    """

    membership: Membership | None = None
    relaying: Relaying = Relaying.A_LITTLE
    ban_list: SharedBanList | None = None


@dataclass(frozen=True)
class Earlier:
    """How a peer was there before its daemon ended.

    :param addresses: at which it could be reached; none if its ports are not to be had any more
    :param neighbours: addresses of other peers that it was connected to
    """

    addresses: tuple[str, ...] = ()
    neighbours: tuple[str, ...] = ()


class _SocketPrefix:
    """Where a daemon, and each who talks to it, has its socket: not in /tmp, if that is not for this process."""

    def __get__(self, one: Any, kind: Any = None) -> str:
        return f"/unix{socket_folder()}/hivemind-"


class TiedP2P(P2P):
    """A libp2p daemon in a session of its own that dies with the process that started it.

    All that a peer sends and receives goes through this class: the DHT makes one, and each averager a replica of it.
    hivemind's own has no say in who may talk to it, lets anybody open streams until there is no descriptor, and reads
    whatever length another peer announces; this one answers nobody who is blocked, counts open streams, and reads no
    message that is too long. What is no stream goes through the daemon, which refuses more than four megabytes itself.

    Works around ``hivemind/p2p/p2p_daemon.py``: ``P2P.create`` starts ``p2pd`` in the caller's process group, where
    an interrupt of the notebook can hit it, and leaves it running when the caller is killed.
    """

    _UNIX_SOCKET_PREFIX = _SocketPrefix()

    #: of the daemon, beside those that hivemind gives it
    further_arguments: ClassVar[Mapping[str, Any]] = {}

    #: whom it refuses; nobody by default
    blocked: BlockedPeers | frozenset[PeerID] = frozenset()

    #: bytes that a message of a stream may have
    longest_message = limit_for(None)

    def __init__(self) -> None:
        super().__init__()
        self._open_streams = OpenStreams()
        #: the addresses of connections that were looked up, and what was found, by peers
        self._looked_up: dict[PeerID, tuple[tuple[Multiaddr, ...], tuple[Multiaddr, ...]]] = {}

    def admit_only(self, membership: Membership | None, ban_list: SharedBanList | None = None) -> None:
        """Talk to nobody else from now on; to be called before anything is sent or handled.

        :param membership: of this peer in the swarm of those; ``None`` to talk to all, as plain hivemind does
        :param ban_list: who is banned from it; by default nobody is
        """
        if membership is None:
            self._client = WatchfulClient(self._client)
        else:
            self._client = GuardedClient(self._client, Guard(membership, self.peer_id, ban_list))

    @property
    def guard(self) -> Guard | None:
        """Who looks at the credentials of others; ``None`` if nobody does."""
        return getattr(self._client, "guard", None)

    def note_in(self, status: AdmissionStatus) -> None:
        """Note there whether others let this peer in."""
        self._client.admission_status = status

    @property
    def refusal(self) -> str:
        """Why another peer has refused to answer, the last time that one did; empty if none has."""
        return str(self._client.refusal)

    @property
    def met_stranger(self) -> bool:
        """Whether another peer was called that has no credential for the swarm of this one."""
        return bool(self._client.met_stranger)

    @classmethod
    def _make_process_args(cls, *args: Any, **kwargs: Any) -> list[str]:
        kwargs |= cls.further_arguments
        if not kwargs.get("trustedRelays"):
            return tied_to_parent(P2P._make_process_args(*args, **kwargs), _DIALS_FROM_ANY_PORT)
        # Behind a firewall it has to dial from the port at which it listens: what comes back to that is let in. And no
        # other relays than those that it is told of: each daemon is one, most of them for 128 KiB and two minutes.
        return tied_to_parent(P2P._make_process_args(*args, **kwargs, relayDiscovery=False))

    # -- what others ask ----------------------------------------------------------------------------------------

    async def add_binary_stream_handler(self, name: str, handler: StreamHandler, balanced: bool = False) -> None:
        async def answer(stream: Any, reader: Any, writer: asyncio.StreamWriter) -> None:
            def check(count: int) -> None:
                if count > self.longest_message:
                    logger.warning(f"{stream.peer_id} wanted to send a message of {count:,} bytes; it was not read")
                    raise RequestTooLongError(b"", count)

            if stream.peer_id in self.blocked:
                writer.close()
                return
            await handler(stream, BoundedReader(reader, check), writer)

        await super().add_binary_stream_handler(name, self._open_streams.counted(answer), balanced)

    async def _add_protobuf_unary_handler(
        self, handle_name: str, handler: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any
    ) -> None:
        async def answer(request: Any, context: P2PContext) -> Any:
            self._refuse(context.remote_id)
            caller.set(context.remote_id)  # each request is handled in a task, and a context, of its own
            return await handler(request, context)

        await super()._add_protobuf_unary_handler(handle_name, answer, *args, **kwargs)

    # -- what others are asked ----------------------------------------------------------------------------------

    async def call_binary_stream_handler(self, peer_id: PeerID, handler_name: str) -> Any:
        self._refuse(peer_id)
        stream, reader, writer = await super().call_binary_stream_handler(peer_id, handler_name)

        def check(count: int) -> None:
            if count > self.longest_message:
                raise P2PHandlerError(f"{peer_id} wanted to answer with a message of {count:,} bytes")

        return stream, BoundedReader(reader, check), writer

    async def _call_unary_protobuf_handler(self, peer_id: PeerID, *args: Any, **kwargs: Any) -> Any:
        self._refuse(peer_id)
        return await super()._call_unary_protobuf_handler(peer_id, *args, **kwargs)

    def _refuse(self, peer: PeerID) -> None:
        if peer in self.blocked:
            raise P2PHandlerError(f"{peer} is blocked")

    # -- where others listen ------------------------------------------------------------------------------------

    async def listening_peers(self, connected: Sequence[PeerInfo] | None = None) -> list[PeerInfo]:
        """Who is connected, and where each can be dialled; at the address of its connection if nothing else is known.

        libp2p asks each new peer where it listens (https://github.com/libp2p/specs/blob/master/identify/README.md).

        :param connected: as :meth:`list_peers` has just told; by default it is asked
        """
        before, now = self._looked_up, {}
        found = []
        for one in await self.list_peers() if connected is None else connected:
            own = tuple(one.addrs)
            known, listens = before.get(one.peer_id, ((), ()))
            if known != own:
                listens = await self._look_up(one.peer_id, own)
            if listens:
                now[one.peer_id] = own, listens
            found.append(PeerInfo(one.peer_id, listens or own))
        self._looked_up = now
        return found

    async def _look_up(self, peer: PeerID, connections: tuple[Multiaddr, ...]) -> tuple[Multiaddr, ...]:
        kind = p2pd_pb2.DHTRequest.FIND_PEER
        wanted = p2pd_pb2.DHTRequest(type=kind, peer=peer.to_bytes(), timeout=_ANSWERS_WITHIN)
        answer: Any = p2pd_pb2.Response()
        reader, writer = await self._client.control.daemon_connector.open_connection()
        try:
            await write_pbmsg(writer, p2pd_pb2.Request(type=p2pd_pb2.Request.DHT, dht=wanted))
            await read_pbmsg_safe(reader, answer)
            raise_if_failed(answer)
        except ControlFailure:
            return ()
        finally:
            writer.close()
        found = [address for one in answer.dht.peer.addrs if _is_spelled(address := Multiaddr(one))]
        is_here = all(is_loopback(str(address)) for address in connections)
        return tuple(address for address in found if is_here or not is_loopback(str(address)))


def _is_spelled(address: Multiaddr) -> bool:
    """Whether hivemind can read an address; it does not know all protocols of others, such as WebTransport."""
    try:
        str(address)
    except ValueError:
        return False
    return True


class NonRelayingP2P(TiedP2P):
    """One that is to pass on nothing between others that cannot reach each other; it still does so for 128 KiB each."""

    further_arguments: ClassVar[Mapping[str, Any]] = {"relayService": False}


class RelayingP2P(TiedP2P):
    """One that is there for others that cannot reach each other."""

    further_arguments = RELAY_ARGUMENTS


_KINDS = {Relaying.NOTHING: NonRelayingP2P, Relaying.A_LITTLE: TiedP2P, Relaying.ALL: RelayingP2P}


class DaemonRecord:
    """What the process of a DHT leaves behind about its daemon, which it does not outlive."""

    _RUNS = 1 << 16

    def __init__(self) -> None:
        self._pid_and_code = RawArray(ctypes.c_int, [0, self._RUNS])
        self._sockets = RawArray(ctypes.c_char, 512)
        #: whether it is about to end as it should
        self.is_to_end = False

    @property
    def pid(self) -> int:
        """Of the daemon; 0 if none was started."""
        return int(self._pid_and_code[0])

    @property
    def exit_code(self) -> int | None:
        """Of the daemon, if that has ended before the process that started it; ``None`` otherwise."""
        code = int(self._pid_and_code[1])
        return None if code == self._RUNS else code

    def watch(self, p2p: P2P) -> None:
        """End this process with a daemon that it has started; to be called on its event loop."""
        self._pid_and_code[0] = p2p._child.pid
        self._sockets.value = f"{p2p._daemon_listen_maddr}\n{p2p._client_listen_maddr}".encode()
        self._task = asyncio.create_task(self._end_with(p2p))

    async def _end_with(self, p2p: P2P) -> None:
        code = await p2p._child.wait()
        if self.is_to_end:
            return
        self._pid_and_code[1] = code
        os._exit(1)  # there is nothing that could be told to anybody

    def remove_sockets(self) -> None:
        """Remove what a daemon that was killed has left in the file system; to be called by the parent of the DHT."""
        for address in self._sockets.value.decode().split("\n"):
            remove_socket(address)


async def start_daemon(
    p2p_kwargs: Mapping[str, Any], initial_peers: Any, identity: bytes, earlier: Earlier | None, admission: Admission
) -> tuple[TiedP2P, Any]:
    """Start a daemon.

    :param p2p_kwargs: keyword arguments of ``P2P.create``
    :param initial_peers: addresses of peers to join
    :param identity: its private key, unless those say where one is
    :param earlier: how it was there before, if it was
    :param admission: who is let in
    :returns: the daemon, and addresses of peers whom it can reach
    :raises P2PDaemonError: if it does not start
    """
    kwargs = dict(p2p_kwargs)
    kind = _KINDS[admission.relaying]
    if earlier is None and not kwargs.get("use_ipfs"):
        kwargs["initial_peers"] = initial_peers
    elif earlier is not None and kwargs.get("host_maddrs") and not kwargs.get("announce_maddrs"):
        kwargs["host_maddrs"] = same_ports([str(one) for one in kwargs["host_maddrs"]], earlier.addresses)
    if kwargs.get("identity_path") is None:
        with identity_file(identity) as path:
            p2p = await kind.create(**kwargs | {"identity_path": path, "check_if_identity_free": False})
    else:
        p2p = await kind.create(**kwargs | ({} if earlier is None else {"check_if_identity_free": False}))
    p2p.admit_only(admission.membership, admission.ban_list)
    if earlier is None:
        return p2p, initial_peers
    # not as the daemon's own initial peers: it would end if none of them is there any more
    return p2p, await _reach(p2p, [*map(str, initial_peers or ()), *earlier.neighbours])


async def _reach(p2p: P2P, addresses: Sequence[str]) -> list[str] | None:
    reached = await asyncio.gather(*(_can_reach(p2p, address) for address in dict.fromkeys(addresses)))
    return [address for address in reached if address] or None


async def _can_reach(p2p: P2P, address: str) -> str | None:
    peer, whole = PeerID.from_base58(Multiaddr(address)["p2p"]), address
    try:
        reachable = Multiaddr(whole.rpartition("/p2p/")[0])
        await asyncio.wait_for(p2p._client.connect(peer, [reachable]), _REACHED_WITHIN)
    except (ControlFailure, P2PDaemonError, OSError, EOFError, TimeoutError, asyncio.TimeoutError) as e:
        logger.debug(f"{address} is not there any more: {e!r}")
        return None
    return whole


def remove_socket(address: str) -> None:
    """Remove the file of a socket at which a process has listened that was killed.

    :param address: a multiaddress such as ``/unix/tmp/some.sock``; empty if there is none
    """
    with suppress(OSError):
        os.unlink(address.removeprefix("/unix"))


def addresses_of(peers: Iterable[Any]) -> tuple[str, ...]:
    """Whole addresses of connected peers, as the daemon lists them."""
    return tuple(f"{address}/p2p/{peer.peer_id}" for peer in peers for address in peer.addrs)
