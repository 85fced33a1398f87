"""Invites and addresses, as a person pastes them."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

from fuzzing.target import Choices, Target
from hivenb.engine.network.access.tokens import Admin, Secret
from hivenb.errors import InviteError
from hivenb.swarm.invite import INVITE_PREFIX, Invite, encode_invite, read_invite

PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
ADDRESS = f"/ip4/203.0.113.5/tcp/31337/p2p/{PEER}"
KEY = base64.b64encode(Admin(Secret("x" * 32)).new_invite().pack()).decode()
PIECES = (
    *("/ip4/", "203.0.113.5", "/tcp/", "31337", "/p2p/", PEER, "/ip6/", "::1", "/dns4/", "host", "/udp/", "/quic"),
    *("/p2p-circuit", "/onion3/", "/ip4/999.1.1.1", "/tcp/99999", "/p2p/0OIl", "/p2p/" + "1" * 2000, "/unix/", "/"),
    *("/ipfs/", "/http", "/certhash/", "/ip6zone/", "%", "x" * 300, " ", ",", "Zo\xeb", "/p2p/" + PEER[:-1], "\0"),
    *("//", "\ud800"),
)


def an_address(choices: Choices) -> str:
    if choices.number(3) == 0:
        return ADDRESS
    return "".join(choices.of(PIECES) for _ in range(choices.number(9)))


def held(choices: Choices, depth: int = 3) -> Any:
    """What an invite may hold, or not."""
    kind = choices.number(8 if depth else 5)
    if kind == 0:
        return an_address(choices)
    if kind == 1:
        return choices.of((None, True, 0, 1e308, -1, "", "s" * 64, KEY, KEY[:-4]))
    if kind == 2:
        return choices.text()
    if kind < 5:
        return [an_address(choices) for _ in range(1 + choices.number(3))]
    if kind == 5:
        return [held(choices, depth - 1) for _ in range(choices.number(4))]
    return {choices.of(("a", "r", "s", "k", "x")): held(choices, depth - 1) for _ in range(choices.number(5))}


def _packed(choices: Choices) -> bytes:
    kind = choices.number(8)
    if kind == 0:
        depth = choices.of((1, 100, 10_000, 60_000))
        text = "[" * depth + "]" * (depth if choices.number(2) else 0)
    elif kind == 1:
        text = json.dumps([ADDRESS + " " * choices.of((1, 10_000, 500_000))])
    elif kind == 2:
        text = choices.text(250)
    else:
        text = json.dumps(held(choices))
    packed = zlib.compress(text.encode("utf-8", "surrogatepass"), 9)
    if choices.now_and_then():
        at = choices.number(256)
        packed = packed[:at] + choices.raw(4) + packed[at + choices.number(4) :]
    return packed


def feed_invites(data: bytes) -> None:
    choices = Choices(data)
    text = INVITE_PREFIX + base64.urlsafe_b64encode(_packed(choices)).decode().rstrip("=")
    if choices.now_and_then():
        at = choices.number(256)
        text = text[:at] + choices.text(8) + text[at:]
    _read(text)


def feed_addresses(data: bytes) -> None:
    choices = Choices(data)
    _read(choices.of((" ", ",", "\n")).join(an_address(choices) for _ in range(1 + choices.number(3))))


def feed_pasted(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    _read(text)
    _read(INVITE_PREFIX + text)


def _read(text: str) -> None:
    found, why = None, ""
    try:
        found = read_invite(text)
    except InviteError as e:
        why = str(e)
    assert len(why) < 1000
    if found is None:
        return
    assert isinstance(found, Invite)
    assert all("/p2p/" in address for address in found.addresses)
    if found.addresses:
        assert read_invite(encode_invite(found.addresses, found.key, found.run_id)) == found


TARGETS = [
    Target("invites", "invites whose content is nested, damaged, huge, or of other kinds", feed_invites),
    Target("addresses", "addresses of peers", feed_addresses),
    Target("pasted", "whatever a person pastes", feed_pasted, 512),
]
