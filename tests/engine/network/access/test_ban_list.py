"""The list of who is banned: only the admin's, only newer ones, and all processes see it."""

from __future__ import annotations

import multiprocessing as mp
import random

import pytest
from hivemind.dht.validation import DHTRecord
from hivemind.utils import MSGPackSerializer, get_dht_time

from hivenb.engine.network.access.ban_list import MOST_BAN_LIST_BYTES, BanList, SharedBanList, read_ban_list
from hivenb.engine.network.access.ban_list_sync import BAN_LIST_KEY_ID, BanListRecords
from hivenb.engine.network.access.tokens import SIGNATURE_BYTES, Admin, Credential, Secret

ADMIN, OTHER = Admin(Secret.random()), Admin(Secret.random())
KEY = Credential(ADMIN.new_invite().public, 1)


def an_id(number: int) -> bytes:
    return b"\x00\x24\x08\x01\x12\x20" + number.to_bytes(32, "big")


def test_it_survives_its_way() -> None:
    made = BanList().with_banned(an_id(1), KEY, [an_id(2), an_id(3)]).with_banned(an_id(3), KEY, [])
    assert made.banned == {an_id(1), an_id(3)}
    assert made.revoked == {KEY.key: {an_id(2)}}, "who stayed, and who was banned later not"
    assert read_ban_list(made.sign(ADMIN), ADMIN.public) == made


def test_each_is_newer_than_the_one_before_and_than_one_begun_anew() -> None:
    first = BanList().with_banned(an_id(1), None, [])
    assert BanList(10**15).with_banned(an_id(2), None, []).version == 10**15 + 1
    assert first.with_banned(an_id(2), None, []).version > first.version > 10**12


@pytest.mark.parametrize("signed", [None, 7, "text", b"", b"\x00" * SIGNATURE_BYTES, [b""], b"\xff" * 1000])
def test_what_is_none(signed: object) -> None:
    assert read_ban_list(signed, ADMIN.public) is None
    assert not SharedBanList(ADMIN.public).take(signed)


def test_a_forged_or_damaged_one() -> None:
    made, dice = BanList().with_banned(an_id(1), KEY, [an_id(2)]), random.Random(1)
    assert read_ban_list(made.sign(OTHER), ADMIN.public) is None
    signed = made.sign(ADMIN)
    assert read_ban_list(signed[:-1], ADMIN.public) is None
    for _ in range(100):
        changed = bytearray(signed)
        changed[dice.randrange(len(signed))] ^= 1 << dice.randrange(8)
        assert read_ban_list(bytes(changed), ADMIN.public) is None


@pytest.mark.parametrize(
    "content",
    [7, [], [1, 2, 3], [1, [7], []], [1, [b"x" * 99], []], [1, [], [[b"short", []]]], [-1, [], []], [2**64, [], []]],
)
def test_one_of_another_form_that_the_admin_has_signed(content: object) -> None:
    packed = MSGPackSerializer.dumps(content) if content != [2**64, [], []] else b"\xc1"
    signed = ADMIN.sign(b"hivenb ban list 1:" + packed) + packed
    assert read_ban_list(signed, ADMIN.public) is None


def test_one_that_is_too_large() -> None:
    staying = [an_id(number) for number in range(MOST_BAN_LIST_BYTES // 38)]
    with pytest.raises(ValueError, match=f"more than {MOST_BAN_LIST_BYTES} bytes"):
        BanList().with_banned(an_id(1), KEY, staying).sign(ADMIN)
    held = BanList().with_banned(an_id(1), KEY, staying[: len(staying) - 50])
    assert SharedBanList(ADMIN.public).take(held.sign(ADMIN)), "some eight hundred"
    packed = MSGPackSerializer.dumps([1, [], []]) + b"\x00" * MOST_BAN_LIST_BYTES
    assert not SharedBanList(ADMIN.public).take(ADMIN.sign(b"hivenb ban list 1:" + packed) + packed)


def test_an_older_one_is_not_believed_again() -> None:
    ban_list, first = SharedBanList(ADMIN.public), BanList().with_banned(an_id(1), None, [])
    second = first.with_banned(an_id(2), None, [])
    assert ban_list.take(second.sign(ADMIN))
    assert not ban_list.take(first.sign(ADMIN))
    assert not ban_list.take(second.sign(ADMIN))
    assert ban_list.list == second
    assert ban_list.signed == second.sign(ADMIN)


@pytest.mark.process
def test_processes_that_were_forked_before_see_it() -> None:
    ban_list = SharedBanList(ADMIN.public)
    context = mp.get_context("fork")
    ours, theirs = context.Pipe()

    def look() -> None:
        while theirs.recv():
            theirs.send(sorted(ban_list.list.banned))

    child = context.Process(target=look, daemon=True)
    child.start()
    try:
        for number in range(3):
            ours.send(True)
            assert ours.recv() == [an_id(one) for one in range(number)]
            assert ban_list.take(ban_list.list.with_banned(an_id(number), None, []).sign(ADMIN))
    finally:
        ours.send(False)
        child.join(10)


def test_one_that_is_half_written_is_not_believed() -> None:
    ban_list = SharedBanList(ADMIN.public)
    assert ban_list.take(BanList().with_banned(an_id(1), None, []).sign(ADMIN))
    before = ban_list.list
    signed = before.with_banned(an_id(2), None, []).sign(ADMIN)
    ban_list._shared[:12] = (before.version + 1).to_bytes(8, "big") + len(signed).to_bytes(4, "big")
    assert ban_list.list == before
    ban_list._shared[12 : 12 + len(signed)] = signed
    assert ban_list.list.banned == {an_id(1), an_id(2)}


class TestRecords:
    """What a node lets stand in the DHT."""

    @staticmethod
    def record(signed: bytes, version: object) -> DHTRecord:
        dumps = MSGPackSerializer.dumps
        return DHTRecord(BAN_LIST_KEY_ID, dumps(version), dumps(signed), get_dht_time() + 60)

    def test_of_the_admin_under_its_version(self) -> None:
        made, validator = BanList().with_banned(an_id(1), None, []), BanListRecords(ADMIN.public)
        assert validator.validate(self.record(made.sign(ADMIN), made.version))
        assert not validator.validate(self.record(made.sign(ADMIN), made.version + 1))
        assert not validator.validate(self.record(made.sign(OTHER), made.version))

    @pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x00", b"\xff" * 100])
    def test_rubbish(self, raw: bytes) -> None:
        validator = BanListRecords(ADMIN.public)
        assert not validator.validate(DHTRecord(BAN_LIST_KEY_ID, raw, raw, get_dht_time() + 60))
        assert validator.validate(DHTRecord(b"another key", raw, raw, get_dht_time() + 60)), "others look at that"
