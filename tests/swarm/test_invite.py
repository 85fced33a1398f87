"""Addresses from whatever people paste, and invites that survive a chat."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import time
import tracemalloc
import zlib
from typing import Any

import pytest

from hivenb.engine.network.access.tokens import NEVER, Admin, Secret
from hivenb.errors import InviteError, SwarmError
from hivenb.swarm.invite import (
    INVITE_PREFIX,
    MOST_BYTES,
    MOST_CHARACTERS,
    Invite,
    decode_invite,
    encode_invite,
    invite_from_environment,
    read_addresses,
    read_invite,
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
        (f"/ip4/127.0.0.1/tcp/1/p2p/{ID[:-3]}", "is not the address of a peer"),
        (f"/ip4/127.0.0.1/tcp/1/p2p/{ID[:10]}{ID[11:]}", "is not the address of a peer"),
        ("/dns4/" + "x" * 2000 + f"/tcp/1/p2p/{ID}", "it has 2,0.. characters"),
    ],
)
def test_what_is_none(given: object, message: str) -> None:
    with pytest.raises(InviteError, match=message) as caught:
        read_addresses(given)
    assert isinstance(caught.value, SwarmError)
    assert isinstance(caught.value, ValueError)
    assert "/ip4/203.0.113.5/tcp/31337/p2p/" in str(caught.value), "an example of one"


#: What comes along when an invite is copied out of a chat, a page or a mail.
AROUND = [
    '"{}"', "'{}'", "`{}`", "({})", "<{}>", "[{}]", "“{}”", "«{}»", "```\n{}\n```", "\ufeff{}", "{}\u200b", "\u2060{}",
    "{}.", "{},", "{})", "{}>", "{}!", "{}…", "{}==", "Here: {}", "Here is it:\n{}\nSee you, Ann", "> {}", "{} thanks",
    "{}\n-- \nA", "{} A", "{} AB", "{} ABC", "invite={}&x=1",
]  # fmt: skip


class TestInvite:
    def test_there_and_back(self) -> None:
        invite = encode_invite(ALL)
        assert re.fullmatch(r"hivenb://[A-Za-z0-9_-]+", invite), "no character that a chat would change"
        assert decode_invite(invite) == Invite(ALL)

    def test_is_short(self) -> None:
        assert len(encode_invite([LOCAL])) < 160

    def test_a_chat_may_break_and_indent_it(self) -> None:
        invite = encode_invite(ALL)
        broken = "\n   ".join(invite[i : i + 20] for i in range(0, len(invite), 20))
        assert decode_invite(f"  {broken}\n") == Invite(ALL)
        assert read_addresses(f"\n{broken} ") == ALL
        for mark in ("> ", "| ", "\\"):  # of a quoted mail, or of a line that goes on
            assert read_addresses(broken.replace("\n   ", f"\n{mark}")) == ALL

    @pytest.mark.parametrize("count", [1, 2, 3, 4, 5], ids=lambda count: f"{count} addresses")
    @pytest.mark.parametrize("around", AROUND)
    def test_what_is_around_it_does_no_harm(self, around: str, count: int) -> None:
        invite = encode_invite(ALL[:count])
        text = around.format(invite)
        assert decode_invite(text) == read_invite(text) == Invite(ALL[:count])

    def test_what_nobody_sees_in_it_does_no_harm(self) -> None:
        invite = encode_invite(ALL)
        assert read_addresses("\u200b".join(invite)) == read_addresses(f"\ufeff{LOCAL}\u200b, " + " ".join(ALL)) == ALL

    def test_several_in_one_text_are_all_read(self) -> None:
        first, second = encode_invite(ALL[:3]), encode_invite(ALL[2:])
        for between in (" ", ",", "\n", ", or "):
            assert read_addresses(f"{first}{between}{second}") == ALL

    @pytest.mark.parametrize(
        "text",
        [
            "An invite begins with hivenb://: {whole}",
            "[{shortened}…]({whole})",
            "{whole}\n-- \nSent with hivenb://",
        ],
    )
    def test_what_only_looks_like_one_beside_it_does_no_harm(self, text: str) -> None:
        invite = encode_invite(ALL)
        assert read_addresses(text.format(whole=invite, shortened=invite[:40])) == ALL

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
        assert invite_from_environment() == Invite()

    @pytest.mark.parametrize("name", ["INITIAL_PEERS", "PL_INITIAL_PEERS"])
    @pytest.mark.parametrize("value", [",".join(ALL), encode_invite(ALL)], ids=["addresses", "invite"])
    def test_set(self, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
        monkeypatch.setenv(name, value)
        assert invite_from_environment() == Invite(ALL)

    def test_the_message_names_the_variable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PL_INITIAL_PEERS", "rubbish")
        with pytest.raises(InviteError, match="the environment variable PL_INITIAL_PEERS: 'rubbish'"):
            invite_from_environment()


# -- of private swarms --------------------------------------------------------------------------------------------

KEY, OTHER = (Admin(Secret.random()).new_invite() for _ in range(2))


def pack(held: Any) -> str:
    """An invite that somebody else has made."""
    unpacked = held if isinstance(held, bytes) else json.dumps(held).encode()
    return INVITE_PREFIX + base64.urlsafe_b64encode(zlib.compress(unpacked, 9)).decode().rstrip("=")


class TestWithKey:
    @pytest.mark.parametrize("run_id", [None, "digits", "Zahlen üben"])
    def test_there_and_back(self, run_id: str | None) -> None:
        invite = encode_invite(ALL, KEY, run_id)
        assert re.fullmatch(r"hivenb://[A-Za-z0-9_-]+", invite)
        assert decode_invite(invite) == Invite(ALL, KEY, run_id)
        assert read_invite([f" {invite[:30]}\n{invite[30:]}"]) == Invite(ALL, KEY, run_id)
        assert read_addresses(invite) == ALL

    def test_is_short_enough_for_a_chat(self) -> None:
        assert len(encode_invite([LOCAL], KEY, "digits")) < 400

    def test_of_an_open_swarm_is_what_it_was(self) -> None:
        assert decode_invite(pack(list(ALL))) == Invite(ALL)

    def test_several_lead_into_one_swarm(self) -> None:
        first, second = encode_invite(ALL[:2], KEY), encode_invite(ALL[1:], KEY, "digits")
        assert read_invite([first, second, LOCAL]) == Invite(ALL, KEY, "digits")
        with pytest.raises(InviteError, match="into different swarms"):
            read_invite([first, encode_invite(ALL, OTHER)])

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda invite: invite[:-9],
            lambda invite: invite.replace("hivenb://", "hivenb:"),
            lambda invite: f"my invite: {invite[:-9]}",
            lambda invite: f"hive\u200bnb://{invite[len(INVITE_PREFIX) : -9]}",
            lambda invite: f"({invite[:60]}A{invite[60:]})",
            lambda invite: invite[:-1] + "!",
            lambda invite: invite[:30] + "AAAA" + invite[30:],
        ],
    )
    @pytest.mark.parametrize("read", [read_invite, decode_invite])
    def test_what_is_wrong_with_one_is_said_without_it(self, spoil: Any, read: Any) -> None:
        invite = encode_invite([LOCAL], KEY)
        with pytest.raises(InviteError) as caught:
            read(spoil(invite))
        told = f"{caught.value} {caught.value.__cause__!r}"
        assert invite[len(INVITE_PREFIX) :][:20] not in told
        assert base64.b64encode(KEY.pack()).decode()[60:80] not in told

    @pytest.mark.parametrize(
        "key", ["short", "", 7, None, ["x" * 40], "x" * 224, "\xeb", base64.b64encode(bytes(168)).decode()]
    )
    def test_a_damaged_key(self, key: Any) -> None:
        with pytest.raises(InviteError, match="the key in the invite is damaged"):
            decode_invite(pack({"a": [LOCAL], "k": key}))

    def test_that_its_holder_has_given_more_time(self) -> None:
        key = Admin(Secret.random()).new_invite(expires=1)
        longer = dataclasses.replace(key, expires=NEVER)
        with pytest.raises(InviteError, match="the key in the invite is damaged"):
            decode_invite(encode_invite([LOCAL], longer))
        assert decode_invite(encode_invite([LOCAL], key)).key == key, "that it has expired is said when it is used"

    def test_of_several_the_one_that_lasts_longest_counts(self) -> None:
        admin = Admin(Secret.random())
        short, long = admin.new_invite(100), admin.new_invite()
        for keys in ((short, long), (long, short)):
            assert read_invite([encode_invite([LOCAL], key) for key in keys]).key == long

    def test_of_an_older_hivenb(self) -> None:
        with pytest.raises(InviteError, match=r"of an older hivenb.*ask for a new one"):
            decode_invite(pack({"a": [LOCAL], "s": "x" * 43}))

    @pytest.mark.parametrize("name", ["", 7, ["x"], "x" * 1000])
    def test_a_damaged_name(self, name: Any) -> None:
        with pytest.raises(InviteError, match="the name of the run in the invite is damaged"):
            decode_invite(pack({"a": [LOCAL], "r": name}))


HOSTILE = {
    "unpacks to 200 MB": zlib.compress(b"0" * 200_000_000, 9),
    "nested": zlib.compress(b"[" * 60_000),
    "nested and closed": zlib.compress(b"[" * 30_000 + b"]" * 30_000),
    "nested dictionaries": zlib.compress(b'{"a":' * 10_000),
    "a long number": zlib.compress(b"9" * 60_000),
    "not text": zlib.compress(b"\xff\xfe"),
    "a number for an address": zlib.compress(b'{"a": [1]}'),
    "no addresses": zlib.compress(b"{}"),
    "a damaged peer id": zlib.compress(json.dumps([f"/ip4/127.0.0.1/tcp/1/p2p/{ID[:-4]}"]).encode()),
    "rubbish": b"\x00" * 1000,
    "empty": b"",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_one_is_an_invite_error_at_once_and_takes_no_memory(name: str) -> None:
    invite = INVITE_PREFIX + base64.urlsafe_b64encode(HOSTILE[name]).decode()
    with pytest.raises(InviteError):  # imports what is needed
        read_addresses("rubbish")
    tracemalloc.start()
    began = time.monotonic()
    try:
        with pytest.raises(InviteError):
            decode_invite(invite)
        assert tracemalloc.get_traced_memory()[1] < 20 * MOST_BYTES
    finally:
        tracemalloc.stop()
    assert time.monotonic() - began < 2.0


@pytest.mark.parametrize("length", [MOST_CHARACTERS + 1, 10 * MOST_CHARACTERS])
def test_one_that_is_too_long_is_not_even_unpacked(length: int) -> None:
    with pytest.raises(InviteError, match=r"damaged|copy the invite alone"):
        decode_invite(INVITE_PREFIX + "A" * length)
