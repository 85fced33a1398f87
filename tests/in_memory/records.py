"""What stands in the DHT of a swarm in memory: with hivenb's own rules, signatures and expiry; late, and lost at times.

One storage for all, which answers each peer over its line.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import PeerID
from hivemind.proto import crypto_pb2
from hivemind.utils import ValueWithExpiration
from hivemind.utils.crypto import RSAPrivateKey

from hivenb.engine.network.access.identity import id_of, prove
from hivenb.engine.network.node import Protocol, Storage
from hivenb.engine.network.records import CheckedOnce, RunRecords, SignatureValidator
from hivenb.engine.network.untrusted_values import BoundedSerializer
from in_memory.clock import Answer, spawn
from in_memory.network import Network

#: Seconds after which a node gives up one that does not answer.
LOST_AFTER = 3.0


@functools.cache
def identity(number: int) -> bytes:
    """Of a peer, the same one in each run of the tests."""
    key = Ed25519PrivateKey.from_private_bytes(number.to_bytes(32, "big"))
    data = key.private_bytes_raw() + key.public_key().public_bytes_raw()
    return bytes(crypto_pb2.PrivateKey(key_type=crypto_pb2.KeyType.Ed25519, data=data).SerializeToString())


@functools.cache
def signing_key(number: int) -> RSAPrivateKey:
    """With which a peer signs what stands under its public key; half as long as others, which is made in no time."""
    made = RSAPrivateKey.__new__(RSAPrivateKey)
    made._private_key = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    return made


class SharedRecords:
    """All that stands there.

    :param network: whose lines it is reached over
    :param seed: of what gets lost
    """

    def __init__(self, network: Network, seed: int = 0) -> None:
        self._network, self._random = network, random.Random(seed)
        self._storage = Storage(is_known=lambda key: True)
        self._validator = CheckedOnce([SignatureValidator(signing_key(0))])
        self._runs: set[str] = set()
        #: how many of the requests get no answer
        self.loss = 0.0
        #: seconds that each request takes beside the line
        self.delay = 0.0

    def know_run(self, run_id: str) -> None:
        """Have the rules of a run's records looked after."""
        if run_id not in self._runs:
            self._runs.add(run_id)
            self._validator.extend([RunRecords(run_id)])

    async def answer(self, peer: PeerID) -> bool:
        """Wait as long as a request takes; whether it is answered."""
        loop, line = asyncio.get_running_loop(), self._network
        await line.stop_if_dead(peer)
        await asyncio.sleep(2 * (line.arrival(peer, 0) - loop.time()) + self.delay)
        others = [other for other, host in line.hosts.items() if host.is_alive and other != peer]
        is_cut_off = bool(others) and all(line.is_cut(peer, other) for other in others)
        if is_cut_off or self._random.random() < self.loss:
            await asyncio.sleep(LOST_AFTER)
            return False
        return True

    def put(self, record: DHTRecord, subkey: Any) -> bool:
        """Take a record in, as a node does that checks what it is sent; whether it has."""
        if not self._validator.validate(record):
            return False
        key = DHTID.from_bytes(record.key)
        is_plain = record.subkey == DHTProtocol.IS_REGULAR_VALUE
        return bool(self._storage.store(key, record.value, record.expiration_time, None if is_plain else subkey))

    def put_unchecked(self, key: str, subkey: Any, value: Any, expiration_time: float) -> None:
        """Have something stand there that a node of plain hivemind has taken in."""
        self._storage.store(_id_of(key), BoundedSerializer.dumps(value), expiration_time, subkey)

    def get(self, key: DHTID) -> Any:
        """What stands under a key, as it was signed."""
        return self._storage.get(key)


@functools.cache
def _id_of(key: str) -> DHTID:
    return DHTID.generate(key)


class InMemoryDHT:
    """A peer's part in it, in place of :class:`hivenb.engine.network.dht.DHT`.

    :param number: of the peer
    """

    def __init__(self, number: int, network: Network, records: SharedRecords, initial_peers: Iterable[str] = ()):
        self._identity = identity(number)
        self.peer_id = PeerID(id_of(self._identity))
        self.private_key = signing_key(number)
        self.client_mode = False
        self.initial_peers = tuple(initial_peers)
        self.p2p = network.p2p_of(self.peer_id)
        self._tasks = network.hosts[self.peer_id].tasks
        self._records = records
        self._validator = CheckedOnce([SignatureValidator(self.private_key)])

    async def open(self) -> None:
        """Let others ask whether it is there."""
        made = await DHTProtocol.create(self.p2p, DHTID.generate(self.peer_id.to_bytes()), 20, 5, 5, LOST_AFTER)
        Protocol.take_over(made)
        self._node: Any = SimpleNamespace(protocol=made, p2p=self.p2p, peer_id=self.peer_id)

    async def replicate_p2p(self) -> Any:
        return self.p2p

    def prove(self, statement: bytes) -> bytes:
        return prove(self._identity, statement)

    def add_validators(self, validators: Iterable[RecordValidatorBase]) -> None:
        self._validator.extend(validators)

    def know_run(self, run_id: str) -> None:
        self._records.know_run(run_id)
        self._validator.extend([RunRecords(run_id)])

    def run_coroutine(self, coro: Any, return_future: bool = False) -> Any:
        return self._begin(coro(self, self._node), return_future)

    def get(self, key: str, latest: bool = False, return_future: bool = False, **kwargs: Any) -> Any:
        return self._begin(self._get(key), return_future)

    def store(
        self, key: str, value: Any, expiration_time: float, subkey: Any = None, return_future: bool = False
    ) -> Any:
        return self._begin(self._store(key, subkey, value, expiration_time), return_future)

    def _begin(self, coroutine: Any, return_future: bool) -> Any:
        answer, loop = Answer(), self.loop
        loop.call_soon(self._run, coroutine, answer)
        return answer if return_future else answer.result()

    #: that all of a test runs in
    loop: asyncio.AbstractEventLoop

    def _run(self, coroutine: Any, answer: Answer) -> None:
        async def run() -> None:
            try:
                result = await coroutine
            except Exception as e:
                if not answer.cancelled():
                    answer.set_exception(e)
            else:
                if not answer.cancelled():
                    answer.set_result(result)

        spawn(self._tasks, run())

    async def _store(self, key: str, subkey: Any, value: Any, expiration_time: float) -> bool:
        dumps = BoundedSerializer.dumps
        record = DHTRecord(_id_of(key).to_bytes(), dumps(subkey), dumps(value), expiration_time)
        signed = DHTRecord(record.key, record.subkey, self._validator.sign_value(record), expiration_time)
        return await self._records.answer(self.peer_id) and self._records.put(signed, subkey)

    async def _get(self, key: str) -> Any:
        if not await self._records.answer(self.peer_id):
            return None
        found = self._records.get(_id_of(key))
        if found is None:
            return None
        if not isinstance(found.value, DictionaryDHTValue):
            return ValueWithExpiration(self._read(key, None, found), found.expiration_time)
        entries = {
            subkey: ValueWithExpiration(self._read(key, subkey, one), one.expiration_time)
            for subkey, one in found.value.items()
        }
        return ValueWithExpiration(entries, found.expiration_time) if entries else None

    def _read(self, key: str, subkey: Any, found: Any) -> Any:
        record = DHTRecord(_id_of(key).to_bytes(), BoundedSerializer.dumps(subkey), *found)
        return BoundedSerializer.loads(self._validator.strip_value(record))
