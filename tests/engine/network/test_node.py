"""Whom a node of the DHT asks, and how often; that nothing is lost by asking fewer. Real DHTs come and are killed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import hivemind
import pytest
from hivemind.dht import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.utils import MSGPackSerializer, get_dht_time
from tiny import LOOPBACK

from hivenb.engine.network.dht import DHT

#: Nodes that hold a record, and nodes in a swarm that is larger.
REPLICAS, MANY = 5, 7

Open = Callable[..., DHT]


@pytest.fixture(scope="module")
def swarm() -> Iterator[list[DHT]]:
    """So many that not all of them hold each record."""
    with ExitStack() as opened:
        members: list[DHT] = []
        for _ in range(MANY):
            members.append(_open(members))
            opened.callback(members[-1].shutdown)
        yield members


@pytest.fixture
def open_dht() -> Iterator[Open]:
    """Opens one that may be killed."""
    with ExitStack() as opened:

        def open_one(others: list[DHT]) -> DHT:
            made = _open(others)
            opened.callback(made.shutdown)
            return made

        yield open_one


def _open(others: list[DHT]) -> DHT:
    addresses = [str(a) for a in others[0].get_visible_maddrs()] if others else None
    return DHT(start=True, initial_peers=addresses, **LOOPBACK)


# -- run in the process of a DHT ----------------------------------------------------------------------------------


async def calls_in(
    action: Callable[[DHTNode], Any], before: Callable[[DHTNode], Any], dht: hivemind.DHT, node: DHTNode
) -> tuple[int, int]:
    """What the node asks the others in order to do something: how often it searches, and how often it stores."""
    await before(node)
    counts = {"call_find": 0, "call_store": 0}

    def counted(name: str, call: Any) -> Any:
        def counting(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return call(*args, **kwargs)

        return counting

    for name in counts:
        setattr(node.protocol, name, counted(name, getattr(node.protocol, name)))
    try:
        await action(node)
        await asyncio.sleep(0.2)  # for what it would do in the background
    finally:
        for name in counts:
            delattr(node.protocol, name)
    return counts["call_find"], counts["call_store"]


async def store(key: str, value: Any, node: DHTNode) -> None:
    assert await node.store(key, value, get_dht_time() + 60, subkey=node.peer_id.to_base58())


async def read(key: str, node: DHTNode) -> None:
    assert await node.get(key, latest=True) is not None


async def store_and_read(key: str, node: DHTNode) -> None:
    await store(key, 1, node)
    await read(key, node)


async def meet(key: str, node: DHTNode) -> None:
    """Know everybody, as those do who have asked all of them once."""
    await node.find_nearest_nodes([node.node_id])
    await store_and_read(key, node)


async def held(key: str, dht: hivemind.DHT, node: DHTNode) -> Any:
    """What this node itself holds under a key."""
    return node.protocol.storage.get(DHTID.generate(source=key))


async def known_peers(dht: hivemind.DHT, node: DHTNode) -> int:
    return len(node.protocol.routing_table.uid_to_peer_id)


async def store_while_somebody_comes(key: str, dht: hivemind.DHT, node: DHTNode) -> None:
    """As over a long line: whoever comes after the node has asked, and before it has the answer."""
    find, known = node.protocol.call_find, await known_peers(dht, node)

    async def find_slowly(*args: Any, **kwargs: Any) -> Any:
        found = await find(*args, **kwargs)
        while await known_peers(dht, node) == known:
            await asyncio.sleep(0.02)
        return found

    node.protocol.call_find = find_slowly
    try:
        await store(key, 1, node)
    finally:
        del node.protocol.call_find


def calls(dht: DHT, action: Callable[[DHTNode], Any], before: Callable[[DHTNode], Any]) -> tuple[int, int]:
    return dht.run_coroutine(partial(calls_in, action, before))


# -- tests --------------------------------------------------------------------------------------------------------


class TestStoring:
    def test_it_searches_for_where_to_store_once(self, swarm: list[DHT]) -> None:
        searches, stores = calls(swarm[1], partial(store, "often", 2), before=partial(meet, "often"))
        assert searches == 0
        assert REPLICAS - 1 <= stores <= REPLICAS, "each replica besides the node itself"

    def test_each_key_has_places_of_its_own(self, swarm: list[DHT]) -> None:
        searches, _ = calls(swarm[2], partial(store, "another", 2), before=partial(meet, "one"))
        assert searches > 0

    def test_what_it_has_read_before_is_not_read_anew(self, swarm: list[DHT]) -> None:
        # hivemind refreshes its cache from the whole swarm whenever it stores to a dictionary that it has read
        searches, stores = calls(swarm[3], partial(store_and_read, "read"), before=partial(meet, "read"))
        assert searches <= REPLICAS // 2 + 1
        assert stores <= REPLICAS, "no copies for the sake of others, either"

    @pytest.mark.process
    def test_a_newcomer_is_found_also_one_that_came_during_a_search(self, open_dht: Open, eventually: Any) -> None:
        pair = [open_dht([])]
        pair.append(open_dht(pair))
        assert calls(pair[0], partial(store, "early", 2), before=partial(meet, "early")) == (0, 1)
        storing = pair[0].run_coroutine(partial(store_while_somebody_comes, "meanwhile"), return_future=True)
        newcomer = open_dht(pair)
        storing.result(60)
        assert pair[0].store("meanwhile", 2, get_dht_time() + 60, subkey=pair[0].peer_id.to_base58())
        record = newcomer.run_coroutine(partial(held, "meanwhile"))
        assert record is not None, "it holds what was stored after it had come"
        eventually(lambda: pair[0].run_coroutine(known_peers) == 2)
        _, stores = calls(pair[0], partial(store, "early", 3), before=partial(read, "early"))
        assert stores == 2, "a pair and one more"
        record = newcomer.get("early", latest=True)
        assert record.value[pair[0].peer_id.to_base58()].value == 3

    @pytest.mark.process
    def test_one_that_was_killed_costs_no_record(self, open_dht: Open, eventually: Any) -> None:
        three = [open_dht([])]
        three += [open_dht(three), open_dht(three)]
        three[1].run_coroutine(partial(calls_in, partial(store, "kept", 2), partial(meet, "kept")))
        three[0].kill()
        three[1].run_coroutine(partial(calls_in, partial(store, "kept", 3), partial(read, "kept")))
        record = three[2].get("kept", latest=True)
        assert record.value[three[1].peer_id.to_base58()].value == 3


class TestReading:
    def test_all_find_what_any_of_them_has_stored(self, swarm: list[DHT]) -> None:
        for member in swarm:
            assert member.store("everybody", 1, expiration_time=get_dht_time() + 60, subkey=member.peer_id.to_base58())
        everybody = {member.peer_id.to_base58() for member in swarm}
        for member in swarm:
            assert set(member.get("everybody", latest=True).value) == everybody

    def test_it_asks_the_majority_of_those_that_hold_a_record(self, swarm: list[DHT]) -> None:
        searches, _ = calls(swarm[4], partial(read, "majority"), before=partial(meet, "majority"))
        assert searches == REPLICAS // 2 + 1


async def write_rubbish(dht: hivemind.DHT, node: DHTNode) -> list[bool]:
    """Store what is no message and what is one, as a stranger does who checks nothing; whether each was taken."""
    key, taken = DHTID.generate("rubbish"), []
    for number, value in enumerate([b"", b"\xc1", b"\x91" * 2000, b"\x01\x02", MSGPackSerializer.dumps("good")]):
        for peer in list(node.protocol.routing_table.peer_id_to_uid):
            stored = await node.protocol.call_store(peer, [key], [value], [get_dht_time() + 60], [number])
            taken.append((number, bool(stored and stored[0])))
    return taken


def test_what_cannot_be_read_is_refused_and_whoever_asks_gets_the_rest(swarm: list[DHT]) -> None:
    stranger = hivemind.DHT(start=True, initial_peers=[str(a) for a in swarm[0].get_visible_maddrs()], **LOOPBACK)
    try:
        taken = stranger.run_coroutine(write_rubbish)
    finally:
        stranger.shutdown()
    assert {number for number, was_taken in taken if was_taken} == {4}
    found = swarm[1].get("rubbish", latest=True, return_future=True).result(10)
    assert {subkey: one.value for subkey, one in found.value.items()} == {4: "good"}
