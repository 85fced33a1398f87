"""Codes that prove who knows a secret: good for one pair of peers, in one direction, and for no other."""

from __future__ import annotations

import pickle
import time
import traceback

import pytest
from hivemind.p2p import PeerID

from hivenb.engine.dht.guard import PROOF_BYTES, Guard, Secret, as_secret
from hivenb.errors import SwarmError

TEXT = "correct horse battery staple, four words"
ANN, BEN, EVE = (PeerID(b"\x00\x24\x08\x01\x12\x20" + letter * 32) for letter in (b"a", b"b", b"e"))


@pytest.fixture
def secret() -> Secret:
    return Secret(TEXT)


@pytest.fixture
def ann(secret: Secret) -> Guard:
    return Guard(secret, ANN)


@pytest.fixture
def ben(secret: Secret) -> Guard:
    return Guard(secret, BEN)


def test_members_admit_each_other(ann: Guard, ben: Guard) -> None:
    assert len(ann.of_call(BEN)) == len(ben.of_answer(ANN)) == PROOF_BYTES
    assert ben.admits_call(ann.of_call(BEN), ANN)
    assert ann.admits_answer(ben.of_answer(ANN), BEN)


@pytest.mark.parametrize("position", [0, 15, PROOF_BYTES - 1])
def test_one_bit_changed(ann: Guard, ben: Guard, position: int) -> None:
    proof = bytearray(ann.of_call(BEN))
    proof[position] ^= 1
    assert not ben.admits_call(bytes(proof), ANN)


@pytest.mark.parametrize("proof", [b"", b"\x00" * PROOF_BYTES, b"short"])
def test_none_at_all(ben: Guard, proof: bytes) -> None:
    assert not ben.admits_call(proof, ANN)
    assert not ben.admits_answer(proof, ANN)


def test_more_or_less_than_a_proof(ann: Guard, ben: Guard) -> None:
    assert not ben.admits_call(ann.of_call(BEN)[:-1], ANN)
    assert not ben.admits_call(ann.of_call(BEN) + b"\x00", ANN)


def test_another_secret(ben: Guard) -> None:
    stranger = Guard(Secret.random(), ANN)
    assert not ben.admits_call(stranger.of_call(BEN), ANN)
    assert not stranger.admits_answer(ben.of_answer(ANN), BEN)


def test_of_somebody_else(ann: Guard, ben: Guard) -> None:
    assert not ben.admits_call(ann.of_call(BEN), EVE), "what Ann has sent is of no use to Eve"


def test_to_another_callee(secret: Secret, ann: Guard, ben: Guard) -> None:
    assert not Guard(secret, EVE).admits_call(ann.of_call(BEN), ANN)


def test_a_call_is_no_answer_and_does_not_go_back(ann: Guard, ben: Guard) -> None:
    assert not ann.admits_answer(ben.of_call(ANN), BEN)
    assert not ann.admits_call(ann.of_call(BEN), BEN), "sent back to whom it came from"
    assert not ben.admits_answer(ann.of_call(BEN), ANN)


def test_ids_of_other_lengths_are_other_ids(secret: Secret) -> None:
    one, other = Guard(secret, PeerID(b"ab")), Guard(secret, PeerID(b"a"))
    assert one.of_call(PeerID(b"cd")) != other.of_call(PeerID(b"bcd"))


def test_it_costs_microseconds(ann: Guard, ben: Guard) -> None:
    began, count = time.perf_counter(), 10_000
    for _ in range(count):
        ben.admits_call(ann.of_call(BEN), ANN)
    assert (time.perf_counter() - began) / count < 100e-6, "a few, on a machine that does nothing else"


class TestSecret:
    def test_random_ones_differ(self) -> None:
        made = {Secret.random().reveal() for _ in range(100)}
        assert len(made) == 100
        assert all(len(text) == 43 for text in made), "256 bits"

    def test_equal_by_its_text(self) -> None:
        assert Secret(TEXT) == Secret(f" {TEXT}\n")
        assert hash(Secret(TEXT)) == hash(Secret(TEXT))
        assert Secret(TEXT) != Secret(TEXT + "!")
        assert Secret(TEXT).key != Secret(TEXT + "!").key
        assert len(Secret(TEXT).key) == 32

    def test_survives_its_way_to_another_process(self) -> None:
        assert pickle.loads(pickle.dumps(Secret(TEXT))) == Secret(TEXT)

    def test_is_not_shown(self, secret: Secret) -> None:
        shown = [repr(secret), str(secret), f"{secret}", repr({"secret": secret}), repr(Guard(secret, ANN))]
        try:
            raise ValueError(secret)
        except ValueError as e:
            shown.append("".join(traceback.format_exception(e)))
        assert not any("horse" in text for text in shown)

    @pytest.mark.parametrize("short", ["", "   ", "secret", "x" * 31, " " * 40])
    def test_that_can_be_guessed(self, short: str) -> None:
        with pytest.raises(SwarmError, match=r"at least 32 characters.*token_urlsafe") as caught:
            Secret(short)
        assert not short.strip() or short.strip() not in str(caught.value).replace("secrets", "").replace(
            "a secret", ""
        )

    def test_that_is_no_text(self) -> None:
        with pytest.raises(SwarmError, match="not a int"):
            Secret(12)  # type: ignore[arg-type]

    def test_what_stands_for_one(self, secret: Secret) -> None:
        assert as_secret(None) is None
        assert as_secret(secret) is secret
        assert as_secret(TEXT) == secret
