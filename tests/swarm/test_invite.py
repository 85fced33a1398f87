"""Addresses from whatever people paste, and invites that survive a chat."""

from __future__ import annotations

import re

import pytest

from hivenb.errors import InviteError, SwarmError
from hivenb.swarm.invite import (
    INVITE_PREFIX,
    addresses_from_environment,
    decode_invite,
    encode_invite,
    read_addresses,
)

ID = "12D3KooWNTpTGNxFtZXDLUk9SpcvF6Qv1bfSVFnZfAhkuBbHbRBq"
LOCAL = f"/ip4/127.0.0.1/tcp/31337/p2p/{ID}"
SIX = f"/ip6/2001:db8::1/tcp/31337/p2p/{ID}"
QUIC = f"/ip4/203.0.113.5/udp/31337/quic-v1/p2p/{ID}"
NAMED = f"/dns4/peer.example.org/tcp/31337/p2p/{ID}"
RELAYED = f"/ip4/203.0.113.5/tcp/1/p2p/{ID}/p2p-circuit/p2p/{ID}"
ALL = (LOCAL, SIX, QUIC, NAMED, RELAYED)


@pytest.mark.parametrize("given", [None, "", "  ", [], (), ["", " "], ","])
def test_nothing(given: object) -> None:
    assert read_addresses(given) == ()


@pytest.mark.parametrize(
    "given",
    [
        ",".join(ALL),
        ", ".join(ALL),
        " ".join(ALL),
        "\n".join(ALL) + "\n",
        list(ALL),
        iter(ALL),
        [",".join(ALL[:2]), *ALL[2:]],
        [*ALL, *ALL],
        encode_invite(ALL),
        [encode_invite(ALL[:3]), encode_invite(ALL[2:])],
    ],
    ids=["commas", "commas and spaces", "spaces", "lines", "list", "iterator", "mixed", "twice", "invite", "invites"],
)
def test_many_ways_to_write_them(given: object) -> None:
    assert read_addresses(given) == ALL


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("rubbish", "'rubbish' is not the address of a peer"),
        ("/ip4/127.0.0.1/tcp/31337", "does not say whose it is"),
        ("/ip4/300.0.0.1/tcp/1/p2p/" + ID, "is not the address of a peer"),
        ("/ip4/127.0.0.1/tcp/99999/p2p/" + ID, "is not the address of a peer"),
        ("/ip4/127.0.0.1/tcp/1/p2p/shortid", "is not the address of a peer"),
        ("/ip4/127.0.0.1/tcp/1/p2p", "is not the address of a peer"),
        ([LOCAL, "rubbish"], "'rubbish'"),
        ("x" * 500, r"'x{57}\.\.\.'"),
    ],
)
def test_what_is_none(given: object, message: str) -> None:
    with pytest.raises(InviteError, match=message) as caught:
        read_addresses(given)
    assert isinstance(caught.value, SwarmError)
    assert isinstance(caught.value, ValueError)
    assert "/ip4/203.0.113.5/tcp/31337/p2p/" in str(caught.value), "an example of one"


class TestInvite:
    def test_there_and_back(self) -> None:
        invite = encode_invite(ALL)
        assert re.fullmatch(r"hivenb://[A-Za-z0-9_-]+", invite), "no character that a chat would change"
        assert decode_invite(invite) == ALL

    def test_is_short(self) -> None:
        assert len(encode_invite([LOCAL])) < 160

    def test_a_chat_may_break_and_indent_it(self) -> None:
        invite = encode_invite(ALL)
        broken = "\n   ".join(invite[i : i + 20] for i in range(0, len(invite), 20))
        assert decode_invite(f"  {broken}\n") == ALL
        assert read_addresses(f"\n{broken} ") == ALL

    @pytest.mark.parametrize("kept", [1, 10, 40])
    def test_cut_off(self, kept: int) -> None:
        invite = encode_invite(ALL)
        with pytest.raises(InviteError, match="damaged, perhaps cut off"):
            decode_invite(invite[: len(INVITE_PREFIX) + kept])

    @pytest.mark.parametrize("word", ["hivenb://", "hivenb://%%%", "hivenb://aGVsbG8"])
    def test_damaged(self, word: str) -> None:
        with pytest.raises(InviteError, match="damaged"):
            decode_invite(word)

    def test_one_letter_changed(self) -> None:
        invite = encode_invite(ALL)
        middle = len(invite) // 2
        changed = invite[:middle] + ("A" if invite[middle] != "A" else "B") + invite[middle + 1 :]
        with pytest.raises(InviteError):
            decode_invite(changed)

    @pytest.mark.parametrize("word", ["", "https://example.org", "HIVENB://abc"])
    def test_something_else(self, word: str) -> None:
        with pytest.raises(InviteError, match="an invite starts with hivenb://"):
            decode_invite(word)

    @pytest.mark.parametrize("held", [[], ["rubbish"], [LOCAL, "/ip4/127.0.0.1/tcp/1"]])
    def test_that_holds_no_addresses(self, held: list[str]) -> None:
        with pytest.raises(InviteError):
            decode_invite(encode_invite(held))


class TestEnvironment:
    @pytest.fixture(autouse=True)
    def unset(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("INITIAL_PEERS", raising=False)
        monkeypatch.delenv("PL_INITIAL_PEERS", raising=False)

    def test_not_set(self) -> None:
        assert addresses_from_environment() == ()

    @pytest.mark.parametrize("name", ["INITIAL_PEERS", "PL_INITIAL_PEERS"])
    @pytest.mark.parametrize("value", [",".join(ALL), encode_invite(ALL)], ids=["addresses", "invite"])
    def test_set(self, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
        monkeypatch.setenv(name, value)
        assert addresses_from_environment() == ALL

    def test_the_message_names_the_variable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PL_INITIAL_PEERS", "rubbish")
        with pytest.raises(InviteError, match="the environment variable PL_INITIAL_PEERS: 'rubbish'"):
            addresses_from_environment()
