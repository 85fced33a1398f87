"""Credentials: good for one peer, of one swarm, until they expire; anything else is none, and nothing raises."""

from __future__ import annotations

import dataclasses
import random
import time

import pytest

from hivenb.engine.network.access.ban_list import BanList
from hivenb.engine.network.access.tokens import (
    CREDENTIAL_BYTES,
    KEY_BYTES,
    NEVER,
    PACKED_BYTES,
    SIGNATURE_BYTES,
    TIME_BYTES,
    Admin,
    Credential,
    InviteKey,
    Secret,
    is_signed,
    membership_of,
    read_credential,
)

ANN, BEN = (b"\x00\x24\x08\x01\x12\x20" + letter * 32 for letter in (b"a", b"b"))
SECRET = Secret("correct horse battery staple, four words")


@pytest.fixture
def admin() -> Admin:
    return Admin(SECRET)


@pytest.fixture
def key(admin: Admin) -> InviteKey:
    return admin.new_invite()


def test_a_credential_is_good_for_its_peer(admin: Admin, key: InviteKey) -> None:
    shown = key.credential_of(ANN)
    assert len(shown) == CREDENTIAL_BYTES
    assert read_credential(shown, ANN, admin.public) == Credential(key.public, NEVER)
    assert read_credential(shown, BEN, admin.public) is None, "what Ann has shown is of no use to Ben"


def test_the_admin_follows_from_the_secret(admin: Admin) -> None:
    assert Admin(Secret(SECRET.reveal())).public == admin.public
    assert Admin(Secret.random()).public != admin.public


def test_of_another_swarm(key: InviteKey) -> None:
    assert read_credential(key.credential_of(ANN), ANN, Admin(Secret.random()).public) is None


def test_an_invite_that_its_holder_has_made(admin: Admin, key: InviteKey) -> None:
    """Who was invited has a key, which the admin has signed, and signs another one with it."""
    own = dataclasses.replace(Admin(Secret.random()).new_invite(), admin=admin.public)
    assert read_credential(own.credential_of(ANN), ANN, admin.public) is None
    borrowed = dataclasses.replace(own, signature=key.signature)
    assert read_credential(borrowed.credential_of(ANN), ANN, admin.public) is None


def test_an_expiry_that_was_put_off(admin: Admin) -> None:
    key = admin.new_invite(int(time.time()) - 10)
    assert key.has_expired
    assert read_credential(key.credential_of(ANN), ANN, admin.public) == Credential(key.public, key.expires), (
        "it is one, of then"
    )
    longer = dataclasses.replace(key, expires=NEVER)
    assert not longer.has_expired
    assert read_credential(longer.credential_of(ANN), ANN, admin.public) is None


@pytest.mark.parametrize(
    "position", [0, KEY_BYTES, KEY_BYTES + TIME_BYTES, CREDENTIAL_BYTES - SIGNATURE_BYTES, CREDENTIAL_BYTES - 1]
)
def test_one_bit_changed(admin: Admin, key: InviteKey, position: int) -> None:
    shown = bytearray(key.credential_of(ANN))
    shown[position] ^= 1
    assert read_credential(bytes(shown), ANN, admin.public) is None


def test_rubbish_is_none_and_raises_nothing(admin: Admin, key: InviteKey) -> None:
    good, dice = key.credential_of(ANN), random.Random(1)
    shown = [
        b"",
        b"\x00" * CREDENTIAL_BYTES,
        b"\xff" * CREDENTIAL_BYTES,
        good[:-1],
        good + b"\x00",
        good[:32],
        good * 2,
    ]
    shown += [dice.randbytes(CREDENTIAL_BYTES) for _ in range(100)]
    shown += [dice.randbytes(KEY_BYTES) + good[KEY_BYTES:] for _ in range(100)]
    assert not any(read_credential(one, ANN, admin.public) for one in shown)
    assert read_credential(good, ANN, b"no key") is None
    assert read_credential(good, b"", admin.public) is None


def test_no_signature_is_good_for_another_purpose(admin: Admin, key: InviteKey) -> None:
    """A ban list, taken for an invite; and an id that looks like what the admin signs."""
    signed = BanList().with_banned(ANN, None, ()).sign(admin)
    signature, statement = signed[:SIGNATURE_BYTES], signed[SIGNATURE_BYTES:]
    assert not is_signed(admin.public, statement, signature)
    own = key.credential_of(key.public + key.expires.to_bytes(TIME_BYTES, "big"))[-SIGNATURE_BYTES:]
    forged = InviteKey(key.public, key.seed, key.expires, own)
    assert read_credential(forged.credential_of(ANN), ANN, key.public) is None


def test_each_invite_has_a_key_of_its_own(admin: Admin) -> None:
    assert len({admin.new_invite().public for _ in range(20)}) == 20


def test_it_survives_its_way(admin: Admin) -> None:
    key = admin.new_invite(int(time.time()) + 60)
    packed = key.pack()
    assert len(packed) == PACKED_BYTES
    assert InviteKey.unpack(packed) == key
    assert membership_of(InviteKey.unpack(packed)).key.credential_of(ANN) == key.credential_of(ANN)  # type: ignore[union-attr]


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


def test_who_knows_the_secret_is_an_admin_and_who_was_invited_is_not(key: InviteKey) -> None:
    own = membership_of(SECRET)
    assert own is not None
    assert own.secret == SECRET
    assert own.key.admin == key.admin
    assert own.key != key
    invited = membership_of(key)
    assert invited is not None
    assert invited.secret is None
    assert membership_of(None) is None
