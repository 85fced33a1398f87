"""What a node of the DHT takes from others: of what stands under a peer's id, only what comes from that peer, and no
more than it can hold. It waits for their answers by how long the last ones took."""

from __future__ import annotations

import contextvars
from collections.abc import Iterable
from typing import Any

from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer, get_dht_time

from hivenb.engine.dht.checked_once import CheckedOnce
from hivenb.engine.dht.checked_values import named
from hivenb.engine.dht.patience import Patience, PatientStub
from hivenb.engine.dht.record_rules import FROM_ONE, RULES, Kind, is_peer_id
from hivenb.engine.dht.signatures import SignatureValidator

#: Keys that a node keeps for others, records under one of them, and bytes of these, at most: what it answers when it is
#: asked for the key is one message, of two megabytes at most.
MAX_KEYS, MAX_RECORDS, MAX_BYTES = 4096, 1024, 3 * 2**19

#: Who has sent what is just being handled.
caller: contextvars.ContextVar[PeerID | None] = contextvars.ContextVar("caller", default=None)


class Storage(DHTLocalStorage):
    """``hivemind``'s, of limited size, in which a value never takes the place of a dictionary.

    What is full takes nothing new: whoever fills it cannot drive out what is there.
    """

    def store(self, key: DHTID, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        known = self.get(key)
        if subkey is None and known is None and len(self) >= MAX_KEYS:
            return False
        is_plain = subkey is None and not isinstance(value, DictionaryDHTValue)
        if is_plain and known is not None and isinstance(known.value, DictionaryDHTValue):
            return False
        return bool(super().store(key, value, expiration_time, subkey))

    def store_subkey(self, key: DHTID, subkey: Any, value: bytes, expiration_time: float) -> bool:
        known = self.get(key)
        if known is None:
            if len(self) >= MAX_KEYS:
                return False
        elif not isinstance(known.value, DictionaryDHTValue):
            del self[key]
        elif subkey not in known.value and not _has_room(known.value, len(value)):
            return False
        return bool(super().store_subkey(key, subkey, value, expiration_time))


def _has_room(dictionary: DictionaryDHTValue, length: int) -> bool:
    size = sum(len(item.value) for _, item in dictionary.items())
    return len(dictionary) < MAX_RECORDS and size + length <= MAX_BYTES


class Protocol(DHTProtocol):
    """``hivemind``'s ``DHTProtocol`` that passes over single bad records, instead of all that stand beside them."""

    _brought: dict[tuple[bytes, bytes], dict[Any, float]]
    _taken: dict[bytes, frozenset[Any]]
    #: how long the last answers of the others took
    patience: Patience

    @classmethod
    def take_over(cls, made: DHTProtocol) -> None:
        """Make one of ours of hivemind's, which has stored nothing yet."""
        # hivemind/dht/node.py:create makes one of its own class
        made.__class__ = cls
        made.record_validator = CheckedOnce(getattr(made.record_validator, "_validators", ()))
        made.storage, made.cache = Storage(), Storage(made.cache.maxsize)
        made._brought, made._taken = {}, {}
        made.patience = Patience()

    def get_stub(self, peer: PeerID) -> PatientStub:
        return PatientStub(super().get_stub(peer), peer, self.patience)

    @classmethod
    def _get_handle_name(cls, namespace: str | None, method_name: str) -> str:
        return str(DHTProtocol._get_handle_name.__func__(DHTProtocol, namespace, method_name))

    def _validate_record(
        self, key_bytes: bytes, subkey_bytes: bytes, value_bytes: bytes, expiration_time: float
    ) -> bool:
        sender = caller.get()
        if sender is None or subkey_bytes in self.RESERVED_SUBKEYS:
            return bool(super()._validate_record(key_bytes, subkey_bytes, value_bytes, expiration_time))
        record = DHTRecord(key_bytes, subkey_bytes, value_bytes, expiration_time)
        try:  # before signatures are looked at, which takes a hundred times as long
            subkey = MSGPackSerializer.loads(subkey_bytes)
            if not self._is_of(sender, subkey, record):
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
        report = MSGPackSerializer.loads(self.record_validator.strip_value(record))
        return report is None or named(report, 32).get("peer_id") == sender.to_bytes()

    def _may_bring(self, sender: PeerID, key: bytes, subkey: Any, expiration: float) -> bool:
        """Whether a peer has not brought as many records under a key as one may."""
        kind, now = self._kind_of(key), get_dht_time()
        most = FROM_ONE if kind is None else RULES[kind].from_one
        brought = self._brought.setdefault((key, sender.to_bytes()), {})
        if subkey not in brought and len(brought) >= most:
            for old in [one for one, expires in brought.items() if expires < now]:
                del brought[old]
            if len(brought) >= most:
                return False
        brought[subkey] = max(expiration, brought.get(subkey, expiration))
        if len(self._brought) > 4 * MAX_RECORDS:
            self._brought = {one: all_ for one, all_ in self._brought.items() if max(all_.values()) >= now}
        return True

    def _kind_of(self, key: bytes) -> Kind | None:
        validators = getattr(self.record_validator, "_validators", ())
        return next((one.kinds.get(key) for one in validators if isinstance(one, SignatureValidator)), None)
