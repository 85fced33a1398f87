"""A node of the DHT that asks the others no more than it has to: a small swarm talks through it all the time."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from hivemind.dht import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import P2PDaemonError, P2PHandlerError, PeerID
from hivemind.utils import get_dht_time, get_logger
from hivemind.utils.multiaddr import Multiaddr

from hivenb.engine.network.records import (
    FROM_ONE,
    KEYS_FROM_ONE,
    RULES,
    CheckedOnce,
    Kind,
    SignatureValidator,
    is_peer_id,
)
from hivenb.engine.network.untrusted_values import BoundedSerializer, named

# -- lost peers ------------------------------------------------------------------------------------------------------
#
# In the DHT's process: finds those again whom this node has known, after a network was cut.
#
# A node strikes off whom it knows at the first request that is not answered (``hivemind/dht/protocol.py``,
# ``update_routing_table``), and dials nobody after its start. Two between whom the line was cut for half a minute
# would never hear of each other again, each the whole of its own swarm.
#
# How often a peer is dialled is the daemon's to say: after each dial in vain it refuses others for longer, by ``5 +
# n**2`` seconds after the n-th, up to five minutes (go-libp2p, ``p2p/net/swarm/swarm_dial.go``), and answers at once
# while it does. Pauses of our own on top of its own would only miss the moment.


logger = get_logger(__name__)

#: Seconds between two looks at who was struck off.
LOOK_EVERY = 2.0

#: Seconds that an attempt may take.
REACHED_WITHIN = 10.0

#: Seconds for which a peer is looked for that was met by itself. Whom this one has joined is looked for always.
REMEMBERED_FOR = 3600.0

#: What is raised where a daemon, or a peer that it is to reach, does not answer.
_NO_ANSWER = (P2PDaemonError, P2PHandlerError, OSError, EOFError, TimeoutError, asyncio.TimeoutError)

#: Peers that are remembered, those who were seen last, and attempts at a time.
MOST_REMEMBERED, AT_A_TIME = 64, 8

#: Addresses that are remembered of those by which a peer was joined: those of the newest invites.
MOST_GIVEN = 16


@dataclass
class KnownPeer:
    """A peer that this node has known.

    :param addresses: at which it listened
    :param seen_at: when it was last in the routing table
    :param given: the addresses by which this peer has joined it; none for others. By a name, it may be elsewhere now
    :param tried_at: when it was last looked for since then
    """

    addresses: tuple[Multiaddr, ...]
    seen_at: float
    given: tuple[Multiaddr, ...] = ()
    tried_at: float = 0.0

    @property
    def is_joined(self) -> bool:
        """Whether its address was given to this peer."""
        return bool(self.given)


class KnownPeers:
    """All whom this node has known, those first who were seen longest ago.

    :param initial_peers: multiaddresses, with ids, of those whom it has joined
    """

    def __init__(self, initial_peers: Iterable[str] = ()):
        self._of: dict[PeerID, KnownPeer] = {}
        self.join(initial_peers)

    def __len__(self) -> int:
        return len(self._of)

    def join(self, initial_peers: Iterable[str]) -> None:
        """Know peers by their addresses, or by further ones, which are tried first.

        :param initial_peers: multiaddresses, with ids
        """
        for peer, addresses in _by_peer(initial_peers).items():
            before = self._of.pop(peer, KnownPeer((), 0.0))
            given = tuple(dict.fromkeys((*addresses, *before.given)))[:MOST_GIVEN]
            self._of[peer] = KnownPeer(tuple(dict.fromkeys((*given, *before.addresses))), time.monotonic(), given)

    def see(self, peer: PeerID, addresses: Iterable[Multiaddr]) -> None:
        """A peer is known at present."""
        before = self._of.pop(peer, KnownPeer((), 0.0))
        known = (*addresses, *before.given) if addresses else before.addresses
        self._of[peer] = KnownPeer(tuple(dict.fromkeys(known)), time.monotonic(), before.given)
        if len(self._of) > MOST_REMEMBERED:
            longest_ago = next((one for one, other in self._of.items() if not other.is_joined), next(iter(self._of)))
            del self._of[longest_ago]

    def lost(self, present: Iterable[PeerID]) -> list[tuple[PeerID, KnownPeer]]:
        """Those to be looked for now, who have not been for longest; they count as tried.

        :param present: who is known at present
        """
        now = time.monotonic()
        forgotten = [peer for peer, one in self._of.items() if not one.is_joined and now - one.seen_at > REMEMBERED_FOR]
        for peer in forgotten:
            del self._of[peer]
        here = set(present)
        lost = [(peer, one) for peer, one in self._of.items() if peer not in here]
        due = sorted(lost, key=lambda pair: pair[1].tried_at)[:AT_A_TIME]
        for _, one in due:
            one.tried_at = now
        return due


async def find_lost_peers(node: DHTNode, known_peers: KnownPeers) -> None:
    """Look for those whom the node has struck off, for as long as the DHT runs.

    :param known_peers: those whom it has joined; others are added as they come
    """
    has_told = False
    while True:
        await asyncio.sleep(LOOK_EVERY)
        try:
            await _look(node, known_peers)
        except _NO_ANSWER as e:  # a daemon that ends is noticed elsewhere
            logger.debug(f"Nobody could be looked for: {e!r}")
        except Exception as e:  # of what one peer says of itself, maybe, which may have gone by the next look
            logger.log(
                logging.DEBUG if has_told else logging.ERROR, f"Nobody could be looked for: {e!r}", exc_info=True
            )
            has_told = True


async def _look(node: DHTNode, known_peers: KnownPeers) -> None:
    present = set(node.protocol.routing_table.peer_id_to_uid)
    for connected in await node.p2p.listening_peers():
        if connected.peer_id in present:
            known_peers.see(connected.peer_id, connected.addrs)
    lost = known_peers.lost({*present, node.peer_id})
    blocked = getattr(node.p2p, "blocked", ())
    await asyncio.gather(*(_reach(node, peer, one.addresses) for peer, one in lost if peer not in blocked))


async def _reach(node: DHTNode, peer: PeerID, addresses: Iterable[Multiaddr]) -> None:
    """Know a peer again, and be known to it, if it answers."""
    try:
        await asyncio.wait_for(node.p2p._client.connect(peer, addresses), REACHED_WITHIN)
        await asyncio.wait_for(node.protocol.call_ping(peer), REACHED_WITHIN)
    except _NO_ANSWER as e:
        logger.debug(f"{peer} cannot be reached: {e!r}")


def _by_peer(addresses: Iterable[str]) -> dict[PeerID, tuple[Multiaddr, ...]]:
    found: dict[PeerID, tuple[Multiaddr, ...]] = {}
    for address in addresses:
        way, _, peer_id = address.rpartition("/p2p/")
        if way:
            peer = PeerID.from_base58(peer_id)
            found[peer] = (*found.get(peer, ()), Multiaddr(way))
    return found


# -- adaptive timeouts -------------------------------------------------------------------------------------------------
#
# How long a node waits for another one's answer: longer where the last answers took long.
#
# A round fills a line, and what is asked meanwhile stands behind megabytes that the system has taken to send them: on
# 10 megabits a second for some seconds, there and back. hivemind waits for three, strikes the other one off, and each
# peer would train alone.


#: How many times the longest of the last answers one may take, beyond what is allowed in any case.
TIMES_AS_LONG = 2.0

#: Seconds beyond that, at most.
LONGEST = 12.0

#: Share of the longest answer that is left of it with each one that is shorter.
FADES = 0.8

#: Peers of whom that is known, at most: those asked last.
MOST_KNOWN = 1024


class AdaptiveTimeouts:
    """How long the last answers of each peer took. For one event loop."""

    def __init__(self) -> None:
        self._longest: dict[PeerID, float] = {}
        #: for how long those were waited for in vain that have not answered since
        self._in_vain: dict[PeerID, float] = {}

    def beyond(self, peer: PeerID) -> float:
        """Seconds that an answer of a peer may take, by its last ones, beyond what is allowed in any case."""
        return min(TIMES_AS_LONG * self._longest.get(peer, 0.0), LONGEST)

    def to_find_again(self, peer: PeerID) -> float:
        """The same where nothing else waits: whoever did not answer in time may do so in more."""
        return max(self.beyond(peer), self._in_vain.get(peer, 0.0))

    async def wait_for(self, peer: PeerID, call: Callable[..., Awaitable[Any]], timeout: float) -> Any:
        """What a peer answers.

        :param call: asks it; takes ``timeout``
        :param timeout: seconds
        :raises TimeoutError: if there is no answer in time
        """
        began = time.monotonic()
        try:
            answer = await call(timeout=timeout)
        except asyncio.TimeoutError:
            _put(self._in_vain, peer, min(timeout, LONGEST))
            raise
        _put(self._longest, peer, max(time.monotonic() - began, FADES * self._longest.get(peer, 0.0)))
        self._in_vain.pop(peer, None)
        return answer


def _put(known: dict[PeerID, float], peer: PeerID, seconds: float) -> None:
    known.pop(peer, None)
    known[peer] = seconds
    if len(known) > MOST_KNOWN:
        del known[next(iter(known))]


class AdaptiveTimeoutStub:
    """Remote calls to one peer that are given time by how long its last answers took.

    :param stub: of hivemind's, whose calls have one answer each
    """

    def __init__(self, stub: Any, peer: PeerID, timeouts: AdaptiveTimeouts):
        self._stub, self._peer, self._timeouts = stub, peer, timeouts

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        call = getattr(self._stub, name)

        async def ask(request: Any, timeout: float) -> Any:
            # those who were struck off are pinged; values are asked for, and stored, where somebody waits
            beyond = self._timeouts.to_find_again if name == "rpc_ping" else self._timeouts.beyond
            return await self._timeouts.wait_for(self._peer, partial(call, request), timeout + beyond(self._peer))

        return ask


# -- storage ---------------------------------------------------------------------------------------------------------
#
# What a node of the DHT keeps for others: all that its runs need, and of anything else no more than it can hold.


#: Keys that a node keeps for others of which it knows nothing.
MAX_KEYS = 4096

#: Records under a key, and bytes of these, at most: what a node answers when it is asked for the key is one message, of
#: two megabytes at most.
MAX_RECORDS, MAX_BYTES = 1024, 3 * 2**19

#: Bytes of memory that all keys take of which a node knows nothing.
MAX_MEMORY = 2**26

#: Bytes of memory that a record takes beside its own, and a byte of a tuple that stands for a subkey.
RECORD_MEMORY, _TUPLE_MEMORY = 512, 32

#: Seconds after which a node that is full looks again at what has expired.
LOOKED_AT_EVERY = 1.0


class Storage(DHTLocalStorage):
    """``hivemind``'s, of limited size, in which a value never takes the place of a dictionary.

    What is full takes nothing new: whoever fills it cannot drive out what is there. Keys of a run have room of their
    own, which nobody takes by storing under others: they are a few hundred, each of :data:`MAX_BYTES` at most.

    :param maxsize: keys at most, of which those go that expire first; any number if ``None``
    :param is_known: whether a key is one of a run that this node takes part in
    """

    def __init__(self, maxsize: int | None = None, is_known: Callable[[DHTID], bool] = lambda key: False):
        super().__init__(maxsize)
        self._is_known = is_known
        #: memory that keys take of which nothing is known, or took when something was last stored under them
        self._taken: dict[DHTID, int] = {}
        self._all_taken = 0
        self._looked_at = -math.inf

    def store(self, key: DHTID, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        if subkey is not None:
            return self.store_subkey(key, subkey, value, expiration_time)
        known = self.get(key)
        is_plain = not isinstance(value, DictionaryDHTValue)
        if is_plain and known is not None and isinstance(known.value, DictionaryDHTValue):
            return False
        has_room = self._is_known(key) or self._take(key, _memory_of(value))
        return has_room and bool(super().store(key, value, expiration_time))

    def store_subkey(self, key: DHTID, subkey: Any, value: bytes, expiration_time: float) -> bool:
        known = self.get(key)
        others = known.value if known is not None and isinstance(known.value, DictionaryDHTValue) else None
        if others is not None and not _has_room(others, subkey, value):
            return False
        if not self._is_known(key):
            memory = RECORD_MEMORY + _bytes_of(subkey, value)
            memory += 0 if others is None else _memory_of(others, but=subkey)
            if not self._take(key, memory):
                return False
        if known is not None and others is None:
            del self[key]
        return bool(super().store_subkey(key, subkey, value, expiration_time))

    def _take(self, key: DHTID, memory: int) -> bool:
        """Note how much a key is to take of which nothing is known, if there is room for that."""
        if not self._would_fit(key, memory):
            self._forget_what_has_expired()
            if not self._would_fit(key, memory):
                return False
        self._all_taken += memory - self._taken.get(key, 0)
        self._taken[key] = memory
        return True

    def _would_fit(self, key: DHTID, memory: int) -> bool:
        before = self._taken.get(key)
        is_one_too_many = before is None and len(self._taken) >= MAX_KEYS
        return not is_one_too_many and self._all_taken + memory - (before or 0) <= MAX_MEMORY

    def _forget_what_has_expired(self) -> None:
        if time.monotonic() - self._looked_at < LOOKED_AT_EVERY:
            return  # all of it is looked at, and whoever fills it asks for that again and again
        self._looked_at = time.monotonic()
        self._taken = {
            key: _memory_of(item.value) for key, item in self.items() if key in self._taken and not self._is_known(key)
        }
        self._all_taken = sum(self._taken.values())


def _has_room(dictionary: DictionaryDHTValue, subkey: Any, value: bytes) -> bool:
    others = [_bytes_of(one, item.value) for one, item in dictionary.items() if one != subkey]
    return len(others) < MAX_RECORDS and sum(others) + _bytes_of(subkey, value) <= MAX_BYTES


def _bytes_of(subkey: Any, value: bytes) -> int:
    if isinstance(subkey, tuple):
        return _TUPLE_MEMORY * len(BoundedSerializer.dumps(subkey)) + len(value)
    return len(value) + (len(subkey) if isinstance(subkey, (bytes, str)) else 0)


def _memory_of(value: Any, but: Any = None) -> int:
    """Of a value, or of a dictionary without the record of a subkey."""
    if not isinstance(value, DictionaryDHTValue):
        return RECORD_MEMORY + len(value)
    return sum(RECORD_MEMORY + _bytes_of(subkey, item.value) for subkey, item in value.items() if subkey != but)


# -- protocol --------------------------------------------------------------------------------------------------------
#
# What a node of the DHT takes from others: of what stands under a peer's id, only what comes from that peer, and no
# more than it can hold. It waits for their answers by how long the last ones took.


#: Who has sent what is just being handled.
caller: contextvars.ContextVar[PeerID | None] = contextvars.ContextVar("caller", default=None)


class Protocol(DHTProtocol):
    """``hivemind``'s ``DHTProtocol`` that passes over single bad records, instead of all that stand beside them."""

    @classmethod
    def take_over(cls, made: DHTProtocol) -> None:
        """Make one of ours of hivemind's, which has stored nothing yet."""
        # hivemind/dht/node.py:create makes one of its own class
        made.__class__ = cls
        cast(Protocol, made)._begin()

    def _begin(self) -> None:
        self.record_validator = CheckedOnce(getattr(self.record_validator, "_validators", ()))
        self.storage, self.cache = (Storage(size, self._is_known) for size in (None, self.cache.maxsize))
        #: by its id, what each peer has brought: under which keys, which records, and until when they stand
        self._brought: dict[bytes, dict[bytes, dict[Any, float]]] = {}
        self._taken: dict[bytes, frozenset[Any]] = {}
        #: how long the last answers of the others took
        self.timeouts = AdaptiveTimeouts()

    def get_stub(self, peer: PeerID) -> AdaptiveTimeoutStub:
        return AdaptiveTimeoutStub(super().get_stub(peer), peer, self.timeouts)

    @classmethod
    def _get_handle_name(cls, namespace: str | None, method_name: str) -> str:
        return str(DHTProtocol._get_handle_name.__func__(DHTProtocol, namespace, method_name))

    def _validate_record(
        self, key_bytes: bytes, subkey_bytes: bytes, value_bytes: bytes, expiration_time: float
    ) -> bool:
        sender = caller.get()
        if sender is None:
            return bool(super()._validate_record(key_bytes, subkey_bytes, value_bytes, expiration_time))
        record = DHTRecord(key_bytes, subkey_bytes, value_bytes, expiration_time)
        try:  # before signatures are looked at, which takes a hundred times as long
            is_plain = subkey_bytes in self.RESERVED_SUBKEYS
            subkey = None if is_plain else BoundedSerializer.loads(subkey_bytes)
            if not is_plain and not self._is_of(sender, subkey, record):
                return False
        except (ValueError, TypeError, RecursionError):  # it cannot be read
            return False
        is_valid = super()._validate_record(key_bytes, subkey_bytes, value_bytes, expiration_time)
        return bool(is_valid) and self._may_bring(sender, key_bytes, subkey, expiration_time)

    def _validate_dictionary(self, key_bytes: bytes, dictionary: DictionaryDHTValue) -> bool:
        with dictionary.freeze():
            looked_at = self._known_first(key_bytes, dictionary)
            good = frozenset(subkey for subkey in looked_at if self._is_good(key_bytes, subkey, dictionary))
            for subkey in set(dictionary.data) - good:
                del dictionary[subkey]
        if caller.get() is None:
            self._taken[key_bytes] = good
            if len(self._taken) > MAX_KEYS:
                self._taken.clear()
        return True

    def _known_first(self, key: bytes, dictionary: DictionaryDHTValue) -> Iterable[Any]:
        """So many of its subkeys as one looks at, before all those under which something was found before."""
        known = self._taken.get(key, frozenset())
        return sorted(dictionary.data, key=lambda subkey: subkey not in known)[:MAX_RECORDS]

    def _is_good(self, key: bytes, subkey: Any, dictionary: DictionaryDHTValue) -> bool:
        value, expiration = dictionary.data[subkey]
        if not isinstance(value, bytes):
            return False
        return self._validate_record(key, self.serializer.dumps(subkey), value, expiration)

    def _is_of(self, sender: PeerID, subkey: Any, record: DHTRecord) -> bool:
        """Whether a record that names a peer comes from that one."""
        if is_peer_id(subkey):
            return bool(subkey == sender.to_bytes())
        if self._kind_of(record.key) is not Kind.PROGRESS:
            return True
        report = BoundedSerializer.loads(self.record_validator.strip_value(record))
        return report is None or named(report, 32).get("peer_id") == sender.to_bytes()

    def _may_bring(self, sender: PeerID, key: bytes, subkey: Any, expiration: float) -> bool:
        """Whether a peer has not brought as many keys, or as many records under one, as one may."""
        kind, now = self._kind_of(key), get_dht_time()
        most = FROM_ONE if kind is None else RULES[kind].from_one
        keys = self._brought.setdefault(sender.to_bytes(), {})
        if kind is None and key not in keys:
            if len(keys) >= KEYS_FROM_ONE:
                _forget(keys, lambda records: max(records.values(), default=now) >= now)
            if sum(self._kind_of(one) is None for one in keys) >= KEYS_FROM_ONE:
                return False
        brought = keys.setdefault(key, {})
        if subkey not in brought and len(brought) >= most:
            _forget(brought, lambda expires: expires >= now)
            if len(brought) >= most:
                return False
        brought[subkey] = max(expiration, brought.get(subkey, expiration))
        if len(self._brought) > MAX_RECORDS:
            _forget(self._brought, lambda keys: any(max(all_.values(), default=0.0) >= now for all_ in keys.values()))
        return True

    def _is_known(self, key: DHTID) -> bool:
        return self._kind_of(key.to_bytes()) is not None

    def _kind_of(self, key: bytes) -> Kind | None:
        validators = getattr(self.record_validator, "_validators", ())
        return next((one.kinds.get(key) for one in validators if isinstance(one, SignatureValidator)), None)


def _forget(noted: dict[Any, Any], is_still_true: Callable[[Any], bool]) -> None:
    for one in [one for one, value in noted.items() if not is_still_true(value)]:
        del noted[one]


# -- node ------------------------------------------------------------------------------------------------------------


#: Seconds for which a node stores to those that it has found to be nearest to a key, while it meets nobody new.
NEAREST_KNOWN_FOR = 30.0

#: By default, nothing is cached. hivemind's node reads a dictionary from the whole swarm anew after each record that it
#: stores in it, and copies what it has read to another node; here, records change once a second.
_CACHING: dict[str, Any] = {"cache_locally": False, "cache_on_store": False, "cache_nearest": 0}

FoundCallback = Callable[[DHTID, list[DHTID], set[DHTID]], Awaitable[Any]]


@dataclass(frozen=True)
class _Nearest:
    """What a search for the nodes that are nearest to a key came to.

    :param nodes: nearest first
    :param known_peers: all whom the node had met when it began
    :param until: when to search anew
    """

    nodes: dict[DHTID, PeerID]
    known_peers: frozenset[DHTID]
    until: float


class Node(DHTNode):
    """``hivemind``'s ``DHTNode`` that searches once for where to store the records of a key.

    hivemind asks up to twenty nodes before each record, and each of them sends all that it holds under that key. In
    order to read the newest records it asks as many; this one asks the majority of those that hold them.
    """

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self._nearest: dict[DHTID, _Nearest] = {}

    @classmethod
    async def create(cls, *args: Any, **kwargs: Any) -> Node:
        """Takes the parameters of ``DHTNode.create``, with other defaults of those that begin with ``cache``."""
        node = cast(Node, await super().create(*args, **{**_CACHING, **kwargs}))
        Protocol.take_over(node.protocol)
        return node

    async def find_nearest_nodes(
        self,
        queries: Collection[DHTID],
        *args: Any,
        node_to_peer_id: dict[DHTID, PeerID] | None = None,
        found_callback: FoundCallback | None = None,
        **kwargs: Any,
    ) -> dict[DHTID, dict[DHTID, PeerID]]:
        if node_to_peer_id is None or found_callback is None:  # not in order to store something
            return await super().find_nearest_nodes(queries, *args, node_to_peer_id=node_to_peer_id, **kwargs)
        self._forget()
        known = {query: self._nearest[query].nodes for query in queries if query in self._nearest}
        for query, nodes in known.items():
            node_to_peer_id.update(nodes)
            await found_callback(query, list(nodes), set())

        # not those of its end: who comes meanwhile was not found, and would get nothing until all is searched anew
        known_peers = self._known_peers

        async def remember(query: DHTID, nearest: list[DHTID], visited: set[DHTID]) -> None:
            nodes = {node: node_to_peer_id[node] for node in nearest}
            self._nearest[query] = _Nearest(nodes, known_peers, get_dht_time() + NEAREST_KNOWN_FOR)
            await found_callback(query, nearest, visited)

        unknown = [query for query in queries if query not in known]
        found = await super().find_nearest_nodes(
            unknown, *args, node_to_peer_id=node_to_peer_id, found_callback=remember, **kwargs
        )
        return {**known, **found}

    async def get_many_by_id(self, key_ids: Collection[DHTID], *args: Any, **kwargs: Any) -> dict[DHTID, Any]:
        # hivemind asks up to twenty nodes, of which num_replicas hold what was stored
        kwargs.setdefault("beam_size", self.num_replicas // 2 + 1)
        return await super().get_many_by_id(key_ids, *args, **kwargs)

    @property
    def _known_peers(self) -> frozenset[DHTID]:
        return frozenset(self.protocol.routing_table.uid_to_peer_id)

    def _forget(self) -> None:
        """Know nothing any more that may have changed: somebody has come, or does not answer and was struck off."""
        now, known_peers = get_dht_time(), self._known_peers
        self._nearest = {
            query: nearest
            for query, nearest in self._nearest.items()
            if nearest.known_peers == known_peers and nearest.until > now
        }
