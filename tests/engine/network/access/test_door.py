"""The list of who was shown the door: only the authority's, only newer ones, and all processes see it."""

from __future__ import annotations

import multiprocessing as mp
import random

import pytest
from hivemind.dht.validation import DHTRecord
from hivemind.utils import MSGPackSerializer, get_dht_time

from hivenb.engine.network.access.revocation_sync import DOOR_KEY_ID, DoorRecords
from hivenb.engine.network.access.revocations import MOST_DOOR_BYTES, Door, DoorList, read_door_list
from hivenb.engine.network.access.tokens import SIGNATURE_BYTES, Authority, Pass, Secret

AUTHORITY, OTHER = Authority(Secret.random()), Authority(Secret.random())
KEY = Pass(AUTHORITY.new_invite().public, 1)


def an_id(number: int) -> bytes:
    return b"\x00\x24\x08\x01\x12\x20" + number.to_bytes(32, "big")


def test_it_survives_its_way() -> None:
    made = DoorList().with_out(an_id(1), KEY, [an_id(2), an_id(3)]).with_out(an_id(3), KEY, [])
    assert made.out == {an_id(1), an_id(3)}
    assert made.revoked == {KEY.key: {an_id(2)}}, "who stayed, and who was shown out later not"
    assert read_door_list(made.sign(AUTHORITY), AUTHORITY.public) == made


def test_each_is_newer_than_the_one_before_and_than_one_begun_anew() -> None:
    first = DoorList().with_out(an_id(1), None, [])
    assert DoorList(10**15).with_out(an_id(2), None, []).version == 10**15 + 1
    assert first.with_out(an_id(2), None, []).version > first.version > 10**12


@pytest.mark.parametrize("signed", [None, 7, "text", b"", b"\x00" * SIGNATURE_BYTES, [b""], b"\xff" * 1000])
def test_what_is_none(signed: object) -> None:
    assert read_door_list(signed, AUTHORITY.public) is None
    assert not Door(AUTHORITY.public).take(signed)


def test_a_forged_or_damaged_one() -> None:
    made, dice = DoorList().with_out(an_id(1), KEY, [an_id(2)]), random.Random(1)
    assert read_door_list(made.sign(OTHER), AUTHORITY.public) is None
    signed = made.sign(AUTHORITY)
    assert read_door_list(signed[:-1], AUTHORITY.public) is None
    for _ in range(100):
        changed = bytearray(signed)
        changed[dice.randrange(len(signed))] ^= 1 << dice.randrange(8)
        assert read_door_list(bytes(changed), AUTHORITY.public) is None


@pytest.mark.parametrize(
    "content",
    [7, [], [1, 2, 3], [1, [7], []], [1, [b"x" * 99], []], [1, [], [[b"short", []]]], [-1, [], []], [2**64, [], []]],
)
def test_one_of_another_form_that_the_authority_has_signed(content: object) -> None:
    packed = MSGPackSerializer.dumps(content) if content != [2**64, [], []] else b"\xc1"
    signed = AUTHORITY.sign(b"hivenb door 1:" + packed) + packed
    assert read_door_list(signed, AUTHORITY.public) is None


def test_one_that_is_too_large() -> None:
    staying = [an_id(number) for number in range(MOST_DOOR_BYTES // 38)]
    with pytest.raises(ValueError, match=f"more than {MOST_DOOR_BYTES} bytes"):
        DoorList().with_out(an_id(1), KEY, staying).sign(AUTHORITY)
    held = DoorList().with_out(an_id(1), KEY, staying[: len(staying) - 50])
    assert Door(AUTHORITY.public).take(held.sign(AUTHORITY)), "some eight hundred"
    packed = MSGPackSerializer.dumps([1, [], []]) + b"\x00" * MOST_DOOR_BYTES
    assert not Door(AUTHORITY.public).take(AUTHORITY.sign(b"hivenb door 1:" + packed) + packed)


def test_an_older_one_is_not_believed_again() -> None:
    door, first = Door(AUTHORITY.public), DoorList().with_out(an_id(1), None, [])
    second = first.with_out(an_id(2), None, [])
    assert door.take(second.sign(AUTHORITY))
    assert not door.take(first.sign(AUTHORITY))
    assert not door.take(second.sign(AUTHORITY))
    assert door.list == second
    assert door.signed == second.sign(AUTHORITY)


@pytest.mark.process
def test_processes_that_were_forked_before_see_it() -> None:
    door = Door(AUTHORITY.public)
    context = mp.get_context("fork")
    ours, theirs = context.Pipe()

    def look() -> None:
        while theirs.recv():
            theirs.send(sorted(door.list.out))

    child = context.Process(target=look, daemon=True)
    child.start()
    try:
        for number in range(3):
            ours.send(True)
            assert ours.recv() == [an_id(one) for one in range(number)]
            assert door.take(door.list.with_out(an_id(number), None, []).sign(AUTHORITY))
    finally:
        ours.send(False)
        child.join(10)


def test_one_that_is_half_written_is_not_believed() -> None:
    door = Door(AUTHORITY.public)
    assert door.take(DoorList().with_out(an_id(1), None, []).sign(AUTHORITY))
    before = door.list
    signed = before.with_out(an_id(2), None, []).sign(AUTHORITY)
    door._shared[:12] = (before.version + 1).to_bytes(8, "big") + len(signed).to_bytes(4, "big")
    assert door.list == before
    door._shared[12 : 12 + len(signed)] = signed
    assert door.list.out == {an_id(1), an_id(2)}


class TestRecords:
    """What a node lets stand in the DHT."""

    @staticmethod
    def record(signed: bytes, version: object) -> DHTRecord:
        dumps = MSGPackSerializer.dumps
        return DHTRecord(DOOR_KEY_ID, dumps(version), dumps(signed), get_dht_time() + 60)

    def test_of_the_authority_under_its_version(self) -> None:
        made, validator = DoorList().with_out(an_id(1), None, []), DoorRecords(AUTHORITY.public)
        assert validator.validate(self.record(made.sign(AUTHORITY), made.version))
        assert not validator.validate(self.record(made.sign(AUTHORITY), made.version + 1))
        assert not validator.validate(self.record(made.sign(OTHER), made.version))

    @pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x00", b"\xff" * 100])
    def test_rubbish(self, raw: bytes) -> None:
        validator = DoorRecords(AUTHORITY.public)
        assert not validator.validate(DHTRecord(DOOR_KEY_ID, raw, raw, get_dht_time() + 60))
        assert validator.validate(DHTRecord(b"another key", raw, raw, get_dht_time() + 60)), "others look at that"
