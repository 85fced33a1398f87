"""A node of the DHT that asks the others no more than it has to: a small swarm talks through it all the time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any, cast

from hivemind.dht import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time

from hivenb.engine.dht.protocol import Protocol

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
    :param acquaintances: all whom the node had met when it began
    :param until: when to search anew
    """

    nodes: dict[DHTID, PeerID]
    acquaintances: frozenset[DHTID]
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
        acquaintances = self._acquaintances

        async def remember(query: DHTID, nearest: list[DHTID], visited: set[DHTID]) -> None:
            nodes = {node: node_to_peer_id[node] for node in nearest}
            self._nearest[query] = _Nearest(nodes, acquaintances, get_dht_time() + NEAREST_KNOWN_FOR)
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
    def _acquaintances(self) -> frozenset[DHTID]:
        return frozenset(self.protocol.routing_table.uid_to_peer_id)

    def _forget(self) -> None:
        """Know nothing any more that may have changed: somebody has come, or does not answer and was struck off."""
        now, acquaintances = get_dht_time(), self._acquaintances
        self._nearest = {
            query: nearest
            for query, nearest in self._nearest.items()
            if nearest.acquaintances == acquaintances and nearest.until > now
        }
