"""What a node keeps for others: what is full keeps what it has, and whoever fills it leaves a run its room."""

from __future__ import annotations

import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.utils import get_dht_time

from hivenb.engine.network import node as module
from hivenb.engine.network.node import MAX_BYTES, MAX_KEYS, MAX_MEMORY, MAX_RECORDS, Storage

KEY = DHTID.generate("key")

OTHERS = [DHTID.generate(number) for number in range(MAX_KEYS + 1)]


def later(seconds: float = 60.0) -> float:
    return get_dht_time() + seconds


def stored(storage: Storage) -> int:
    """Bytes of all records."""
    return sum(sum(len(one.value) for _, one in item.value.items()) for _, item in storage.items())


def test_a_value_takes_no_dictionarys_place_and_a_dictionary_that_of_a_value() -> None:
    storage = Storage()
    assert storage.store(KEY, b"plain", later(500))
    assert storage.store(KEY, b"entry", later(10), subkey="a")
    assert not storage.store(KEY, b"plain", later(500))
    found = storage.get(KEY)
    assert found is not None
    assert isinstance(found.value, DictionaryDHTValue)
    assert found.value.get("a").value == b"entry"


def test_what_is_full_keeps_what_it_has() -> None:
    storage = Storage()
    assert all(storage.store_subkey(KEY, number, b"x", later()) for number in range(MAX_RECORDS))
    assert not storage.store_subkey(KEY, "one more", b"x", later(120))
    assert storage.store_subkey(KEY, 0, b"newer", later(120))
    large = DHTID.generate("large")
    taken = sum(storage.store_subkey(large, number, b"x" * 8192, later()) for number in range(MAX_RECORDS))
    assert taken == MAX_BYTES // 8192
    others = [DHTID.generate(number) for number in range(MAX_KEYS)]
    assert sum(storage.store(one, b"x", later()) for one in others) == MAX_KEYS - 2
    assert not storage.store_subkey(others[-1], "a", b"x", later())


def test_a_record_that_grows_is_looked_at_like_a_new_one() -> None:
    storage = Storage()
    for number in range(MAX_RECORDS):
        storage.store_subkey(KEY, number, b"x", later())
    grown = [storage.store_subkey(KEY, number, b"x" * 8192, later(120)) for number in range(MAX_RECORDS)]
    assert 0 < sum(grown) < MAX_RECORDS
    assert stored(storage) <= MAX_BYTES


def test_subkeys_take_room_too() -> None:
    storage = Storage()
    taken = sum(storage.store_subkey(KEY, f"{number:08192}", b"x", later()) for number in range(MAX_RECORDS))
    assert taken == MAX_BYTES // 8193


def test_keys_of_which_nothing_is_known_take_no_more_memory_than_there_is_for_them() -> None:
    storage = Storage(is_known=KEY.__eq__)
    large = bytes(8192)
    taken = [storage.store_subkey(key, number, large, later()) for key in OTHERS[:60] for number in range(192)]
    assert 0.9 * MAX_MEMORY < stored(storage) <= MAX_MEMORY
    assert not taken[-1]
    assert all(storage.store_subkey(KEY, number, large, later()) for number in range(192)), "there is room for a run"


def test_what_is_full_has_room_again_when_something_has_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    now = get_dht_time()
    monkeypatch.setattr("hivemind.utils.timed_storage.get_dht_time", lambda: now)
    monkeypatch.setattr(module, "LOOKED_AT_EVERY", 0.0)
    storage = Storage(is_known=KEY.__eq__)
    assert all(storage.store(key, b"x", now + 10) for key in OTHERS[:MAX_KEYS])
    assert not storage.store(OTHERS[-1], b"x", now + 60)
    assert storage.store_subkey(KEY, b"peer", b"x", now + 60), "that of a run"
    now += 11
    assert storage.store(OTHERS[-1], b"x", now + 60)
    assert len(storage) == 2
