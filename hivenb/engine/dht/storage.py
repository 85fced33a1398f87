"""What a node of the DHT keeps for others: all that its runs need, and of anything else no more than it can hold."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue

from hivenb.engine.dht.carried_values import BoundedSerializer

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
