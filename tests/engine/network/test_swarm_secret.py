"""The secret of a private swarm: hard to guess, and not shown."""

from __future__ import annotations

import pickle
import traceback

import pytest

from hivenb.engine.network.access.tokens import Admin, Secret, as_secret, membership_of
from hivenb.errors import SwarmError

TEXT = "correct horse battery staple, four words"


@pytest.fixture
def secret() -> Secret:
    return Secret(TEXT)


def test_random_ones_differ() -> None:
    made = {Secret.random().reveal() for _ in range(100)}
    assert len(made) == 100
    assert all(len(text) == 43 for text in made), "256 bits"


def test_equal_by_its_text() -> None:
    assert Secret(TEXT) == Secret(f" {TEXT}\n")
    assert hash(Secret(TEXT)) == hash(Secret(TEXT))
    assert Secret(TEXT) != Secret(TEXT + "!")
    assert Secret(TEXT).key != Secret(TEXT + "!").key
    assert len(Secret(TEXT).key) == 32


def test_survives_its_way_to_another_process() -> None:
    assert pickle.loads(pickle.dumps(Secret(TEXT))) == Secret(TEXT)


def test_is_not_shown(secret: Secret) -> None:
    shown = [
        repr(secret),
        str(secret),
        f"{secret}",
        repr({"secret": secret}),
        repr(membership_of(secret)),
        repr(Admin(secret)),
    ]
    try:
        raise ValueError(secret)
    except ValueError as e:
        shown.append("".join(traceback.format_exception(e)))
    assert not any("horse" in text for text in shown)


@pytest.mark.parametrize("short", ["", "   ", "secret", "x" * 31, " " * 40])
def test_that_can_be_guessed(short: str) -> None:
    with pytest.raises(SwarmError, match=r"at least 32 characters.*token_urlsafe") as caught:
        Secret(short)
    assert not short.strip() or short.strip() not in str(caught.value).replace("secrets", "").replace("a secret", "")


def test_that_is_no_text() -> None:
    with pytest.raises(SwarmError, match="not a int"):
        Secret(12)  # type: ignore[arg-type]


def test_what_stands_for_one(secret: Secret) -> None:
    assert as_secret(None) is None
    assert as_secret(secret) is secret
    assert as_secret(TEXT) == secret
