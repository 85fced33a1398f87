"""Invites from somebody who wants no company: what they do to whoever joins with them."""

from __future__ import annotations

import base64
import json
import resource
import time
import zlib
from collections.abc import Callable

from attacks.case import Attack, Outcome
from hivemind.utils.multiaddr import Multiaddr

import hivenb
from hivenb.errors import InviteError
from hivenb.swarm import invite

#: Bytes of memory, and seconds, that a refusal may take.
MEMORY, SECONDS = 20e6, 5.0

_ID = "12D3KooWNTpTGNxFtZXDLUk9SpcvF6Qv1bfSVFnZfAhkuBbHbRBq"


def pack(unpacked: bytes) -> str:
    return invite.INVITE_PREFIX + base64.urlsafe_b64encode(zlib.compress(unpacked, 9)).decode()


def join(word: Callable[[], str]) -> Callable[[], Outcome]:
    def attempt() -> Outcome:
        given = word()
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
        try:
            hivenb.Swarm.join(given)
            said = "let in"
        except Exception as e:
            said = type(e).__name__
        seconds = time.monotonic() - began
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        held = said == InviteError.__name__ and grown < MEMORY and seconds < SECONDS
        return Outcome(held, f"{said}, {grown / 1e6:.0f} MB, {seconds:.1f} s")

    return attempt


def bomb() -> str:
    compressing = zlib.compressobj(9)
    packed = b"".join(compressing.compress(b"0" * 1_000_000) for _ in range(200)) + compressing.flush()
    return invite.INVITE_PREFIX + base64.urlsafe_b64encode(packed).decode()


def without_limits() -> None:
    invite.MOST_CHARACTERS = invite.MOST_BYTES = 1 << 40


def without_depth() -> None:
    invite.RecursionError = type("Nothing", (Exception,), {})  # type: ignore[attr-defined]


def without_check_of_ids() -> None:
    invite._checked = lambda address: str(Multiaddr(address))


ATTACKS = [
    Attack("invite-of-200-MB", "an invite that unpacks to 200 MB", without_limits, join(bomb)),
    Attack("nested-invite", "an invite of 50,000 opened brackets", without_depth, join(lambda: pack(b"[" * 50_000))),
    Attack(
        "invite-with-a-damaged-id",
        "an invite whose peer id is cut off",
        without_check_of_ids,
        join(lambda: pack(json.dumps([f"/ip4/127.0.0.1/tcp/1/p2p/{_ID[:-5]}"]).encode())),
    ),
]
