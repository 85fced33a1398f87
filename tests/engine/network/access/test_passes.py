"""Passes: good for one peer, of one swarm, until they expire; anything else is none, and nothing raises."""

from __future__ import annotations

import dataclasses
import random
import time

import pytest

from hivenb.engine.network.access.revocations import DoorList
from hivenb.engine.network.access.tokens import (
    KEY_BYTES,
    NEVER,
    PACKED_BYTES,
    PASS_BYTES,
    SIGNATURE_BYTES,
    TIME_BYTES,
    Authority,
    InviteKey,
    Pass,
    Secret,
    is_signed,
    membership_of,
    read_pass,
)

ANN, BEN = (b"\x00\x24\x08\x01\x12\x20" + letter * 32 for letter in (b"a", b"b"))
SECRET = Secret("correct horse battery staple, four words")


@pytest.fixture
def authority() -> Authority:
    return Authority(SECRET)


@pytest.fixture
def key(authority: Authority) -> InviteKey:
    return authority.new_invite()


def test_a_pass_is_good_for_its_peer(authority: Authority, key: InviteKey) -> None:
    shown = key.pass_of(ANN)
    assert len(shown) == PASS_BYTES
    assert read_pass(shown, ANN, authority.public) == Pass(key.public, NEVER)
    assert read_pass(shown, BEN, authority.public) is None, "what Ann has shown is of no use to Ben"


def test_the_authority_follows_from_the_secret(authority: Authority) -> None:
    assert Authority(Secret(SECRET.reveal())).public == authority.public
    assert Authority(Secret.random()).public != authority.public


def test_of_another_swarm(key: InviteKey) -> None:
    assert read_pass(key.pass_of(ANN), ANN, Authority(Secret.random()).public) is None


def test_an_invite_that_its_holder_has_made(authority: Authority, key: InviteKey) -> None:
    """Who was invited has a key, which the authority has signed, and signs another one with it."""
    own = dataclasses.replace(Authority(Secret.random()).new_invite(), authority=authority.public)
    assert read_pass(own.pass_of(ANN), ANN, authority.public) is None
    borrowed = dataclasses.replace(own, signature=key.signature)
    assert read_pass(borrowed.pass_of(ANN), ANN, authority.public) is None


def test_an_expiry_that_was_put_off(authority: Authority) -> None:
    key = authority.new_invite(int(time.time()) - 10)
    assert key.has_expired
    assert read_pass(key.pass_of(ANN), ANN, authority.public) == Pass(key.public, key.expires), "it is one, of then"
    longer = dataclasses.replace(key, expires=NEVER)
    assert not longer.has_expired
    assert read_pass(longer.pass_of(ANN), ANN, authority.public) is None


@pytest.mark.parametrize(
    "position", [0, KEY_BYTES, KEY_BYTES + TIME_BYTES, PASS_BYTES - SIGNATURE_BYTES, PASS_BYTES - 1]
)
def test_one_bit_changed(authority: Authority, key: InviteKey, position: int) -> None:
    shown = bytearray(key.pass_of(ANN))
    shown[position] ^= 1
    assert read_pass(bytes(shown), ANN, authority.public) is None


def test_rubbish_is_none_and_raises_nothing(authority: Authority, key: InviteKey) -> None:
    good, dice = key.pass_of(ANN), random.Random(1)
    shown = [b"", b"\x00" * PASS_BYTES, b"\xff" * PASS_BYTES, good[:-1], good + b"\x00", good[:32], good * 2]
    shown += [dice.randbytes(PASS_BYTES) for _ in range(100)]
    shown += [dice.randbytes(KEY_BYTES) + good[KEY_BYTES:] for _ in range(100)]
    assert not any(read_pass(one, ANN, authority.public) for one in shown)
    assert read_pass(good, ANN, b"no key") is None
    assert read_pass(good, b"", authority.public) is None


def test_no_signature_is_good_for_another_purpose(authority: Authority, key: InviteKey) -> None:
    """A list of who is out, taken for an invite; and an id that looks like what the authority signs."""
    signed = DoorList().with_out(ANN, None, ()).sign(authority)
    signature, statement = signed[:SIGNATURE_BYTES], signed[SIGNATURE_BYTES:]
    assert not is_signed(authority.public, statement, signature)
    own = key.pass_of(key.public + key.expires.to_bytes(TIME_BYTES, "big"))[-SIGNATURE_BYTES:]
    forged = InviteKey(key.public, key.seed, key.expires, own)
    assert read_pass(forged.pass_of(ANN), ANN, key.public) is None


def test_each_invite_has_a_key_of_its_own(authority: Authority) -> None:
    assert len({authority.new_invite().public for _ in range(20)}) == 20


def test_it_survives_its_way(authority: Authority) -> None:
    key = authority.new_invite(int(time.time()) + 60)
    packed = key.pack()
    assert len(packed) == PACKED_BYTES
    assert InviteKey.unpack(packed) == key
    assert membership_of(InviteKey.unpack(packed)).key.pass_of(ANN) == key.pass_of(ANN)  # type: ignore[union-attr]


@pytest.mark.parametrize("position", [0, KEY_BYTES, 2 * KEY_BYTES, PACKED_BYTES - 1, None])
def test_one_that_is_damaged(key: InviteKey, position: int | None) -> None:
    packed = bytearray(key.pack())
    if position is None:
        packed.pop()
    else:
        packed[position] ^= 1
    with pytest.raises(ValueError, match=r"its signature is wrong|it has \d+ bytes"):
        InviteKey.unpack(bytes(packed))


def test_it_is_not_shown(key: InviteKey) -> None:
    shown = f"{key!r} {key} {membership_of(key)!r}"
    assert "seed" not in shown
    assert repr(key.seed) not in shown


def test_who_knows_the_secret_is_an_authority_and_who_was_invited_is_not(key: InviteKey) -> None:
    own = membership_of(SECRET)
    assert own is not None
    assert own.secret == SECRET
    assert own.key.authority == key.authority
    assert own.key != key
    invited = membership_of(key)
    assert invited is not None
    assert invited.secret is None
    assert membership_of(None) is None
