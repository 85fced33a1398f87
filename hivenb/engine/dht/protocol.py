"""What a node of the DHT takes from others: of what stands under a peer's id, only what comes from that peer, and no
more than it can hold. It waits for their answers by how long the last ones took."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable
from typing import Any

from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time

from hivenb.engine.dht.carried_values import BoundedSerializer
from hivenb.engine.dht.checked_once import CheckedOnce
from hivenb.engine.dht.checked_values import named
from hivenb.engine.dht.patience import Patience, PatientStub
from hivenb.engine.dht.record_rules import FROM_ONE, KEYS_FROM_ONE, RULES, Kind, is_peer_id
from hivenb.engine.dht.signatures import SignatureValidator
from hivenb.engine.dht.storage import MAX_KEYS, MAX_RECORDS, Storage

#: Who has sent what is just being handled.
caller: contextvars.ContextVar[PeerID | None] = contextvars.ContextVar("caller", default=None)


class Protocol(DHTProtocol):
    """``hivemind``'s ``DHTProtocol`` that passes over single bad records, instead of all that stand beside them."""

    #: by its id, what each peer has brought: under which keys, which records, and until when they stand
    _brought: dict[bytes, dict[bytes, dict[Any, float]]]
    _taken: dict[bytes, frozenset[Any]]
    #: how long the last answers of the others took
    patience: Patience

    @classmethod
    def take_over(cls, made: DHTProtocol) -> None:
        """Make one of ours of hivemind's, which has stored nothing yet."""
        # hivemind/dht/node.py:create makes one of its own class
        made.__class__ = cls
        made.record_validator = CheckedOnce(getattr(made.record_validator, "_validators", ()))
        made.storage, made.cache = (Storage(size, made._is_known) for size in (None, made.cache.maxsize))
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
