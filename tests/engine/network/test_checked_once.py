"""A record is looked at once by all validators of a node, and anew when there are others."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import CompositeValidator, DHTRecord, RecordValidatorBase

from hivenb.engine.network.dht import DHT
from hivenb.engine.network.records import LARGEST, REMEMBERED, CheckedOnce


class Looking(RecordValidatorBase):
    """Notes what it was shown, of which it finds right what holds no such word."""

    def __init__(self, refused: bytes = b"wrong"):
        self.refused = refused
        self.seen: list[DHTRecord] = []

    def validate(self, record: DHTRecord) -> bool:
        self.seen.append(record)
        return self.refused not in record.value


@pytest.fixture
def record() -> DHTRecord:
    return DHTRecord(DHTID.generate("key").to_bytes(), b"subkey", b"right", 1e10)


def test_one_answer_is_given_again(record: DHTRecord) -> None:
    looking = Looking()
    validators = CheckedOnce([looking])
    wrong = dataclasses.replace(record, value=b"wrong")
    assert [validators.validate(record), validators.validate(wrong)] == [True, False]
    assert [validators.validate(record), validators.validate(wrong)] == [True, False]
    assert looking.seen == [record, wrong]


@pytest.mark.parametrize(
    "change", [{"value": b"right, too"}, {"expiration_time": 2e10}, {"subkey": b"another"}], ids=str
)
def test_what_differs_is_another_record(record: DHTRecord, change: dict[str, bytes]) -> None:
    looking = Looking()
    validators = CheckedOnce([looking])
    for one in (record, dataclasses.replace(record, **change)):
        assert validators.validate(one)
    assert len(looking.seen) == 2


def test_with_another_validator_all_are_looked_at_anew(record: DHTRecord) -> None:
    validators = CheckedOnce([Looking()])
    assert validators.validate(record)
    validators.extend([Looking(refused=b"right")])
    assert not validators.validate(record)


def test_it_remembers_no_more_than_it_may(record: DHTRecord) -> None:
    looking = Looking()
    validators = CheckedOnce([looking])
    for number in range(REMEMBERED + 1):
        validators.validate(dataclasses.replace(record, subkey=b"%d" % number))
    validators.validate(dataclasses.replace(record, subkey=b"0"))
    assert len(looking.seen) == REMEMBERED + 2


@pytest.mark.parametrize("field", ["value", "subkey"])
def test_what_is_longer_than_it_stores_is_not_remembered(record: DHTRecord, field: str) -> None:
    """Refused as they are, those of megabytes would fill the memory."""
    looking = Looking(refused=b"x" * LARGEST)
    validators = CheckedOnce([looking])
    long = dataclasses.replace(record, **{field: b"x" * LARGEST})
    expected = field != "value"
    assert [validators.validate(long) for _ in range(2)] == [expected] * 2
    assert len(looking.seen) == 2
    gone = weakref.ref(long)
    del long
    looking.seen.clear()
    assert gone() is None, "something holds it still"


async def _kind(dht: DHT, node: object) -> type[CompositeValidator]:
    return type(node.protocol.record_validator)  # type: ignore[attr-defined]


def test_a_node_has_such_ones(dht: DHT) -> None:
    assert dht.run_coroutine(_kind) is CheckedOnce
