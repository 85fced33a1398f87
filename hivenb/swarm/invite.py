"""Addresses of peers: read from what people paste, and packed into an invite of one word."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import zlib
from collections.abc import Iterable, Sequence

from hivenb.errors import InviteError

#: An invite is this, followed by a compressed list of addresses without any character that a chat would change.
INVITE_PREFIX = "hivenb://"

#: Where addresses of peers are looked for when none are given; the first one is the documented name.
ENVIRONMENT_VARIABLES = ("INITIAL_PEERS", "PL_INITIAL_PEERS")

_EXAMPLE = "/ip4/203.0.113.5/tcp/31337/p2p/12D3Koo..."


def read_addresses(given: str | Iterable[object] | None) -> tuple[str, ...]:
    """Multiaddresses out of whatever names peers.

    :param given: an invite, a multiaddress, several of them separated by commas or white space, or a list of these
    :returns: multiaddresses, each with the id of its peer, in order and without repetition
    :raises InviteError: if an invite or an address cannot be read
    """
    if given is None:
        return ()
    if isinstance(given, str):
        if given.strip().startswith(INVITE_PREFIX):
            return decode_invite(given)
        words: Sequence[str] = [word for word in re.split(r"[\s,]+", given) if word]
        return tuple(dict.fromkeys(_checked(word) for word in words))
    return tuple(dict.fromkeys(address for one in given for address in read_addresses(str(one))))


def addresses_from_environment() -> tuple[str, ...]:
    """Multiaddresses of peers from ``INITIAL_PEERS`` or, if that is not set, from ``PL_INITIAL_PEERS``.

    :raises InviteError: if the variable holds something else
    """
    for name in ENVIRONMENT_VARIABLES:
        if value := os.environ.get(name, "").strip():
            try:
                return read_addresses(value)
            except InviteError as e:
                raise InviteError(f"the environment variable {name}: {e}") from e
    return ()


def encode_invite(addresses: Sequence[str]) -> str:
    """One word that a person can paste into a chat; the inverse of :func:`decode_invite`."""
    packed = zlib.compress(json.dumps(list(addresses), separators=(",", ":")).encode(), level=9)
    return INVITE_PREFIX + base64.urlsafe_b64encode(packed).decode().rstrip("=")


def decode_invite(invite: str) -> tuple[str, ...]:
    """The addresses in an invite.

    :param invite: what ``Swarm.invite`` gave; line breaks and spaces from a chat do no harm
    :raises InviteError: if it is not an invite, or a part of it is missing
    """
    word = re.sub(r"\s+", "", invite)
    if not word.startswith(INVITE_PREFIX):
        raise InviteError(f"{_shown(invite)} is not an invite: an invite starts with {INVITE_PREFIX}")
    body = word[len(INVITE_PREFIX) :]
    try:
        packed = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
        addresses = json.loads(zlib.decompress(packed))
    except (binascii.Error, zlib.error, ValueError) as e:
        raise InviteError(
            f"the invite {_shown(invite)} is damaged, perhaps cut off when it was copied; copy it once more, whole"
        ) from e
    if not (isinstance(addresses, list) and addresses and all(isinstance(a, str) for a in addresses)):
        raise InviteError(f"the invite {_shown(invite)} holds no addresses; ask for a new one")
    return tuple(_checked(address) for address in addresses)


def _checked(address: str) -> str:
    from hivemind.utils.multiaddr import Multiaddr

    try:
        parsed = Multiaddr(address)
        named = "p2p" in parsed
    except (ValueError, KeyError, LookupError) as e:
        raise InviteError(f"{_shown(address)} is not the address of a peer ({e}); one looks like {_EXAMPLE}") from e
    if not named:
        raise InviteError(f"the address {_shown(address)} does not say whose it is; it has to end like {_EXAMPLE}")
    return str(parsed)


def _shown(text: str) -> str:
    text = " ".join(text.split())
    return repr(text if len(text) <= 60 else text[:57] + "...")
