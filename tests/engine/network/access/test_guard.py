"""Whom a guard lets in: members with a good credential that are not out, and nobody else, whatever they send."""

from __future__ import annotations

import random
import time

import pytest
from hivemind.p2p import PeerID

from hivenb.engine.network.access import guard as guard_module
from hivenb.engine.network.access.ban_list import BanList, SharedBanList
from hivenb.engine.network.access.guard import BANNED, EXPIRED, STRANGER, Guard
from hivenb.engine.network.access.tokens import (
    CREDENTIAL_BYTES,
    Admin,
    Credential,
    InviteKey,
    Membership,
    Secret,
    membership_of,
)

SECRET = Secret("correct horse battery staple, four words")
ADMIN = Admin(SECRET)
ANN, BEN, EVE = (PeerID(b"\x00\x24\x08\x01\x12\x20" + letter * 32) for letter in (b"a", b"b", b"e"))


@pytest.fixture
def key() -> InviteKey:
    return ADMIN.new_invite()


@pytest.fixture
def ban_list() -> SharedBanList:
    return SharedBanList(ADMIN.public)


@pytest.fixture
def ann(ban_list: SharedBanList) -> Guard:
    return guard_of(SECRET, ANN, ban_list)


@pytest.fixture
def ben(key: InviteKey) -> Guard:
    return guard_of(key, BEN)


def guard_of(given: Secret | InviteKey, peer: PeerID, ban_list: SharedBanList | None = None) -> Guard:
    membership = membership_of(given)
    assert membership is not None
    return Guard(membership, peer, ban_list)


def ban_peer(ban_list: SharedBanList, peer: PeerID, key: InviteKey | None, staying: tuple[PeerID, ...] = ()) -> None:
    shown = None if key is None else Credential(key.public, key.expires)
    ids = [one.to_bytes() for one in staying]
    assert ban_list.take(ban_list.list.with_banned(peer.to_bytes(), shown, ids).sign(ADMIN))


def test_members_admit_each_other(ann: Guard, ben: Guard) -> None:
    assert len(ann.own_credential) == len(ben.own_credential) == CREDENTIAL_BYTES
    assert ann.why_not(ben.own_credential, BEN) is None
    assert ben.why_not(ann.own_credential, ANN) is None
    assert ann.why_no_more(BEN) is ann.why_no_more(EVE) is None


def test_a_credential_of_somebody_else_or_another_swarm(ann: Guard, ben: Guard) -> None:
    assert ann.why_not(ben.own_credential, EVE) == STRANGER, "what Ben has sent is of no use to Eve"
    assert ann.why_not(ann.own_credential, EVE) == STRANGER, "sent back to whom it came from"
    assert ann.why_not(guard_of(Secret.random(), BEN).own_credential, BEN) == STRANGER


def test_rubbish_is_of_a_stranger_and_raises_nothing(ann: Guard, ben: Guard) -> None:
    dice, good = random.Random(1), ben.own_credential
    shown = [b"", b"short", b"\x00" * CREDENTIAL_BYTES, good[:-1], good + b"\x00"]
    shown += [dice.randbytes(CREDENTIAL_BYTES) for _ in range(50)]
    assert {ann.why_not(one, BEN) for one in shown} == {STRANGER}
    assert ann.seen == {}, "it takes no room"


def test_what_strangers_show_drives_out_no_member(ann: Guard, ben: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_module, "_KEPT_CREDENTIALS", 8)
    assert ann.why_not(ben.own_credential, BEN) is None
    for number in range(20):
        ann.why_not(number.to_bytes(CREDENTIAL_BYTES, "big"), EVE)
    monkeypatch.setattr(guard_module, "read_credential", None)  # would raise: it is known already
    assert ann.why_not(ben.own_credential, BEN) is None


def test_it_expires_while_it_is_known(ann: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    key = ADMIN.new_invite(int(now) + 100)
    shown = key.credential_of(BEN.to_bytes())
    assert ann.why_not(shown, BEN) is ann.why_no_more(BEN) is None
    monkeypatch.setattr(time, "time", lambda: now + 101)
    assert ann.why_not(shown, BEN) == ann.why_no_more(BEN) == EXPIRED
    assert guard_of(SECRET, ANN).why_not(shown, BEN) == EXPIRED, "whoever sees it for the first time"


def test_who_is_out_is_out_with_any_credential(ann: Guard, ben: Guard, ban_list: SharedBanList) -> None:
    assert ann.why_not(ben.own_credential, BEN) is None
    ban_peer(ban_list, BEN, None)
    assert ann.why_not(ben.own_credential, BEN) == ann.why_no_more(BEN) == BANNED
    assert ann.why_not(ADMIN.new_invite().credential_of(BEN.to_bytes()), BEN) == BANNED


def test_nobody_comes_back_by_the_same_invite_but_others_stay(
    ann: Guard, key: InviteKey, ban_list: SharedBanList
) -> None:
    ban_peer(ban_list, BEN, key, staying=(EVE,))
    other = PeerID(b"\x00\x24\x08\x01\x12\x20" + b"o" * 32)
    assert ann.why_not(key.credential_of(other.to_bytes()), other) == BANNED, "another id"
    assert ann.why_not(key.credential_of(EVE.to_bytes()), EVE) is None
    new = ADMIN.new_invite()
    assert ann.why_not(new.credential_of(other.to_bytes()), other) is None, "who was invited anew"
    ban_peer(ban_list, EVE, key)
    assert ann.why_not(key.credential_of(EVE.to_bytes()), EVE) == BANNED, "one of those who stayed"


def test_it_costs_microseconds(ann: Guard, ben: Guard, ban_list: SharedBanList) -> None:
    ban_peer(ban_list, EVE, None)
    began, count = time.perf_counter(), 10_000
    for _ in range(count):
        ann.why_not(ben.own_credential, BEN)
    assert (time.perf_counter() - began) / count < 100e-6, "a few, on a machine that does nothing else"


def test_it_shows_no_key() -> None:
    key = ADMIN.new_invite()
    assert key.seed not in Guard(Membership(key), ANN).own_credential
    assert BanList().version == 0
