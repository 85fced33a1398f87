"""What a node takes from others, who are real nodes that check nothing, and what it makes of their answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import hivemind
import pytest
from hivemind.dht import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey
from tiny import LOOPBACK

from hivenb.engine.network import node as protocol
from hivenb.engine.network.access.identity import id_of, new_identity
from hivenb.engine.network.access.tokens import Secret
from hivenb.engine.network.dht import DHT
from hivenb.engine.network.node import MAX_KEYS, MAX_RECORDS, Storage
from hivenb.engine.network.record_board import owner_of
from hivenb.engine.network.records import FROM_ONE, KEYS_FROM_ONE, RULES, Kind


def later(seconds: float = 60.0) -> float:
    return get_dht_time() + seconds


@pytest.fixture(scope="module")
def swarm() -> Iterator[DHT]:
    opened = DHT(start=True, **LOOPBACK)
    opened.know_run("known")
    yield opened
    opened.shutdown()


@pytest.fixture(scope="module")
def stranger(swarm: DHT) -> Iterator[hivemind.DHT]:
    opened = hivemind.DHT(start=True, initial_peers=[str(a) for a in swarm.get_visible_maddrs()], **LOOPBACK)
    yield opened
    opened.shutdown()


async def send(records: list[tuple[str, Any, Any, float]], dht: hivemind.DHT, node: DHTNode) -> list[bool]:
    """Store records at all other nodes, as a stranger does who checks nothing; whether they were taken."""
    (peer,) = node.protocol.routing_table.peer_id_to_uid
    return await send_to(peer, records, dht, node)


async def send_to(peer: PeerID, records: list[tuple[str, Any, Any, float]], dht: hivemind.DHT, node: Any) -> list[bool]:
    keys = [DHTID.generate(key) for key, *_ in records]
    values = [MSGPackSerializer.dumps(value) for *_, value, _ in records]
    return [
        bool(one)
        for one in await node.protocol.call_store(
            peer, keys, values, [expires for *_, expires in records], [subkey for _, subkey, *_ in records]
        )
    ]


async def send_dictionary(key: str, entries: dict[Any, Any], dht: hivemind.DHT, node: DHTNode) -> None:
    (peer,) = node.protocol.routing_table.peer_id_to_uid
    dictionary = DictionaryDHTValue()
    for subkey, value in entries.items():
        dictionary.store(subkey, MSGPackSerializer.dumps(value), later())
    await node.protocol.call_store(peer, [DHTID.generate(key)], [dictionary], [later()])


async def answer(key: str, entries: int, dht: hivemind.DHT, node: DHTNode) -> None:
    """Hold so many records of a key, to answer with them when asked for it."""
    for number in range(entries):
        expires = later()
        node.protocol.storage.store_subkey(DHTID.generate(key), number, MSGPackSerializer.dumps(number), expires)
    node.protocol.storage.store_subkey(DHTID.generate(key), "bad", b"\xc1", later())


class TestTaking:
    @pytest.fixture
    def sent(self, stranger: hivemind.DHT) -> Callable[..., list[bool]]:
        return lambda *records: stranger.run_coroutine(partial(send, list(records)))

    def test_what_stands_under_the_id_of_a_peer_comes_from_it(
        self, stranger: hivemind.DHT, swarm: DHT, sent: Callable[..., list[bool]]
    ) -> None:
        for key in ("known_grad_averager.0b", "of another run"):
            own, others = stranger.peer_id.to_bytes(), swarm.peer_id.to_bytes()
            assert sent((key, own, True, later()), (key, others, False, later())) == [True, False]
            found = swarm.get(key, latest=True)
            assert set(found.value) == {own}

    def test_what_it_passes_on_of_others_is_left_out_and_the_rest_is_taken(
        self, stranger: hivemind.DHT, swarm: DHT
    ) -> None:
        own, others = stranger.peer_id.to_bytes(), id_of(new_identity())
        stranger.run_coroutine(partial(send_dictionary, "passed on", {own: 1, others: 2, "text": 3}))
        assert set(swarm.get("passed on", latest=True).value) == {own, "text"}

    def test_no_plain_value_and_none_for_an_hour_stands_under_a_key_of_a_run(
        self, stranger: hivemind.DHT, sent: Callable[..., list[bool]]
    ) -> None:
        own = stranger.peer_id.to_bytes()
        keys = ("known_grad_averager.0b01", "known_state_averager.all_averagers", "known_progress", "known_options")
        assert sent(*((key, None, 1.0, later()) for key in keys)) == [False] * 4
        assert sent(*((key, own, 1.0, later(3600)) for key in keys)) == [False] * 4

    def test_a_report_comes_from_the_peer_that_it_names(
        self, stranger: hivemind.DHT, swarm: DHT, sent: Callable[..., list[bool]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # signatures are made by the validators of the stranger's own node, which has none: it withdraws, at best
        reports = [{"peer_id": one} for one in (swarm.peer_id.to_bytes(), id_of(new_identity()))]
        records = [("known_progress", owner_of(RSAPrivateKey()), report, later()) for report in reports]
        assert sent(*records) == [False, False]

    def test_one_peer_brings_no_more_than_its_share(self, sent: Callable[..., list[bool]]) -> None:
        taken = sent(*(("share", number, 1, later()) for number in range(2 * FROM_ONE)))
        assert sum(taken) == FROM_ONE
        assert sent(("share", 0, 2, later(70))) == [True], "it may change what it has brought"
        assert RULES[Kind.PROGRESS].from_one < 10

    def test_one_peer_brings_no_more_keys_than_its_share_and_those_of_a_run_beside(
        self, swarm: DHT, stranger: hivemind.DHT, sent: Callable[..., list[bool]]
    ) -> None:
        swarm.run_coroutine(_forget_what_was_brought)
        plain = sent(*((f"plain {number}", None, 1, later()) for number in range(KEYS_FROM_ONE // 2)))
        taken = sent(*((f"key {number}", "a", 1, later()) for number in range(KEYS_FROM_ONE)))
        assert sum(plain) + sum(taken) == KEYS_FROM_ONE
        assert sent(("key 0", "b", 1, later())) == [True]
        assert sent(("known_grad_averager.0b1", stranger.peer_id.to_bytes(), True, later())) == [True]


async def _forget_what_was_brought(dht: DHT, node: Any) -> None:
    node.protocol._brought.clear()


def test_of_an_answer_what_is_good_is_taken_and_no_more_than_one_looks_at(swarm: DHT, stranger: hivemind.DHT) -> None:
    stranger.run_coroutine(partial(answer, "answered", 2 * MAX_RECORDS))
    found = swarm.get("answered", latest=True, return_future=True).result(20)
    assert MAX_RECORDS / 2 < len(found.value) <= MAX_RECORDS
    assert "bad" not in found.value


@pytest.mark.process
def test_strangers_leave_the_keys_of_a_run_their_room(swarm: DHT) -> None:
    async def fill(dht: DHT, node: Any) -> list[bool]:
        storage = Storage(is_known=node.protocol._is_known)
        for number in range(MAX_KEYS):
            storage.store(DHTID.generate(number), b"x", later())
        keys = "another key", "known_progress", "known_grad_averager.0b010"
        return [storage.store_subkey(DHTID.generate(key), b"peer", b"x", later()) for key in keys]

    assert swarm.run_coroutine(fill) == [False, True, True]


def test_nobody_is_the_caller_of_what_a_node_asks_itself() -> None:
    assert protocol.caller.get() is None


@pytest.mark.process
def test_in_a_private_swarm_all_sign_what_stands_under_their_ids() -> None:
    secret = Secret.random()
    with ExitStack() as opened:
        members: list[DHT] = []
        for _ in range(3):
            addresses = [str(one) for one in members[0].get_visible_maddrs()] if members else None
            members.append(DHT(start=True, initial_peers=addresses, secret=secret, **LOOPBACK))
            opened.callback(members[-1].shutdown)
        own = members[1].peer_id.to_bytes()
        assert members[1].store("private", True, subkey=own, expiration_time=later())
        found = members[2].get("private", latest=True)
        assert {subkey: one.value for subkey, one in found.value.items()} == {own: True}
        # the member itself, but without a signature
        unsigned = [("private", own, False, later(90))]
        assert members[1].run_coroutine(partial(send_to, members[0].peer_id, unsigned)) == [False]
