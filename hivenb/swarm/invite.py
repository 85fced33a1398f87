"""What leads into a swarm: read from what people paste, and packed into an invite of one word."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import unicodedata
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hivenb.engine.network.access.tokens import Admin, InviteKey, Secret
from hivenb.errors import InviteError, SwarmError

#: An invite is this, followed by compressed JSON without any character that a chat would change.
INVITE_PREFIX = "hivenb://"

#: Where addresses of peers are looked for when none are given; the first one is the documented name.
ENVIRONMENT_VARIABLES = ("INITIAL_PEERS", "PL_INITIAL_PEERS")

#: Characters of an invite, bytes that it unpacks to, and characters of an address and of a run's name, at most: an
#: invite may come from anybody. One with twenty addresses has 1,500, and unpacks to 2,000.
MOST_CHARACTERS, MOST_BYTES, MOST_IN_ADDRESS, MOST_IN_NAME = 1 << 14, 1 << 16, 1024, 256

_EXAMPLE = "/ip4/203.0.113.5/tcp/31337/p2p/12D3Koo..."


@dataclass(frozen=True)
class Invite:
    """What leads into a swarm.

    :param addresses: multiaddresses of its peers
    :param key: that lets its holder in; ``None`` for one that is open to all
    :param run_id: name of the run that its peers train in; ``None`` if they have not said so
    """

    addresses: tuple[str, ...] = ()
    key: InviteKey | None = None
    run_id: str | None = None


def read_invite(given: str | Iterable[object] | None) -> Invite:
    """All that leads into a swarm, out of whatever names peers.

    :param given: as for :func:`read_addresses`
    :raises InviteError: if an invite or an address cannot be read, or two of them lead into different swarms
    """
    if given is None:
        return Invite()
    if not isinstance(given, str):
        return _together([read_invite(str(one)) for one in given])
    if bodies := _bodies(given):
        return _together(_whole(bodies))
    words: Sequence[str] = [word for word in re.split(r"[\s,]+", _visible(given)) if word]
    return Invite(tuple(dict.fromkeys(_checked(word) for word in words)))


def _whole(bodies: Sequence[str]) -> list[Invite]:
    """Those of several invites that can be read: one may be shortened in the text of a link to another.

    :raises InviteError: if none can
    """
    invites, errors = list[Invite](), list[InviteError]()
    for body in bodies:
        try:
            invites.append(decode_invite(INVITE_PREFIX + body))
        except InviteError as e:
            errors.append(e)
    if not invites:
        raise errors[0]
    return invites


def _together(invites: Sequence[Invite]) -> Invite:
    keys = [one.key for one in invites if one.key is not None]
    if len({key.admin for key in keys}) > 1:
        raise InviteError("the invites lead into different swarms; give those of one")
    names = [one.run_id for one in invites if one.run_id is not None]
    addresses = dict.fromkeys(address for one in invites for address in one.addresses)
    longest = max(keys, key=lambda key: key.expires, default=None)
    return Invite(tuple(addresses), longest, names[0] if names else None)


def check_together(secret: Secret | None, invite: Invite) -> None:
    """Compare a secret with the invite that was given beside it.

    :raises SwarmError: if they are of different swarms
    """
    if secret is not None and invite.key is not None and Admin(secret).public != invite.key.admin:
        raise SwarmError(
            "the secret is not that of the invite; leave out secret=, without which the invite lets you in"
        )


def read_addresses(given: str | Iterable[object] | None) -> tuple[str, ...]:
    """Multiaddresses out of whatever names peers.

    :param given: an invite, a multiaddress, several of them separated by commas or white space, or a list of these
    :returns: multiaddresses, each with the id of its peer, in order and without repetition
    :raises InviteError: if an invite or an address cannot be read
    """
    return read_invite(given).addresses


def invite_from_environment() -> Invite:
    """What leads into a swarm, from ``INITIAL_PEERS`` or, if that is not set, from ``PL_INITIAL_PEERS``.

    :raises InviteError: if the variable holds something else
    """
    for name in ENVIRONMENT_VARIABLES:
        if value := os.environ.get(name, "").strip():
            try:
                return read_invite(value)
            except InviteError as e:
                raise InviteError(f"the environment variable {name}: {e}") from e
    return Invite()


def encode_invite(addresses: Sequence[str], key: InviteKey | None = None, run_id: str | None = None) -> str:
    """One word that a person can paste into a chat; the inverse of :func:`decode_invite`."""
    held: Any = list(addresses)
    if key is not None or run_id is not None:
        held = {"a": held}
        if run_id is not None:
            held["r"] = run_id
        if key is not None:
            held["k"] = base64.b64encode(key.pack()).decode()
    packed = zlib.compress(json.dumps(held, separators=(",", ":")).encode(), level=9)
    return INVITE_PREFIX + base64.urlsafe_b64encode(packed).decode().rstrip("=")


def decode_invite(invite: str) -> Invite:
    """What an invite holds.

    :param invite: what ``Swarm.invite`` gave; line breaks and spaces from a chat do no harm, nor do quotes and words
      around it
    :raises InviteError: if it is not an invite, or a part of it is missing
    """
    if len(invite) > 2 * MOST_CHARACTERS:
        raise InviteError(f"what is given for an invite has {len(invite):,} characters; copy the invite alone")
    if not (bodies := _bodies(invite)):
        raise InviteError(f"{_shown(invite)} is not an invite: an invite starts with {INVITE_PREFIX}")
    word = INVITE_PREFIX + bodies[0]
    try:
        held = json.loads(_unpacked(bodies[0]))
    except (binascii.Error, zlib.error, ValueError, RecursionError):
        # not "from": an error in the middle of an invite holds what was read of it, and with it the key
        raise InviteError(
            f"the invite {_shown(word)} of {len(word)} characters is damaged, perhaps cut off when it was copied; "
            "copy it once more, whole"
        ) from None
    held = {"a": held} if isinstance(held, list) else held
    addresses = held.get("a") if isinstance(held, dict) else None
    if not (isinstance(addresses, list) and addresses and all(isinstance(a, str) for a in addresses)):
        raise InviteError(f"the invite {_shown(word)} holds no addresses; ask for a new one")
    return Invite(tuple(dict.fromkeys(map(_checked, addresses))), _key_in(held), _name_in(held))


def _visible(text: str) -> str:
    """The same without what nobody sees, such as a byte order mark or the zero-width spaces of a chat."""
    return "".join(character for character in text if unicodedata.category(character) != "Cf")


def _bodies(text: str) -> list[str]:
    """What follows the beginning of each invite in a text, without what is in none, such as marks of a quoted mail."""
    _, *parts = "".join(_visible(text).split()).split(INVITE_PREFIX)
    return [re.sub(r"[^A-Za-z0-9_-]", "", part)[:MOST_CHARACTERS] for part in parts]


def _unpacked(body: str) -> bytes:
    if len(body) > MOST_CHARACTERS:
        raise ValueError
    # Words that stood behind it are in it as well: what is packed says itself where it ends. One character alone is no
    # byte, and can only be of those.
    body = body[:-1] if len(body) % 4 == 1 else body
    inflating = zlib.decompressobj()
    unpacked = inflating.decompress(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)), MOST_BYTES)
    if not inflating.eof:  # there is more of it than there may be, or less than there was
        raise ValueError
    return unpacked


def _key_in(held: dict[str, Any]) -> InviteKey | None:
    if "s" in held:
        raise InviteError("the invite is of an older hivenb, and holds a secret instead of a key; ask for a new one")
    try:
        return InviteKey.unpack(base64.b64decode(held["k"], validate=True)) if "k" in held else None
    except (binascii.Error, ValueError, TypeError):
        raise InviteError("the key in the invite is damaged; ask for a new one") from None


def _name_in(held: dict[str, Any]) -> str | None:
    name = held.get("r")
    if name is not None and not (isinstance(name, str) and 0 < len(name) <= MOST_IN_NAME):
        raise InviteError("the name of the run in the invite is damaged; ask for a new one")
    return name


def _checked(address: str) -> str:
    from hivemind.p2p import PeerID
    from hivemind.utils.multiaddr import Multiaddr

    try:
        if len(address) > MOST_IN_ADDRESS:
            raise ValueError(f"it has {len(address):,} characters")
        parsed = Multiaddr(address)
        text, named = str(parsed), "p2p" in parsed
        if named:
            PeerID.from_base58(parsed["p2p"])
    except (ValueError, LookupError) as e:
        # a word that does not begin like an address may be part of an invite, which nothing shows whole
        raise InviteError(
            f"{_shown(address)} is not the address of a peer ({_why(e, address)}); one looks like {_EXAMPLE}"
        ) from (e if address.startswith("/") else None)
    if not named:
        raise InviteError(f"the address {_shown(address)} does not say whose it is; it has to end like {_EXAMPLE}")
    return text


def _why(error: Exception, address: str) -> str:
    text = str(error).rpartition(repr(address))[2].strip(" :")  # without the address, which may be long
    return text if len(text) <= 200 else text[:197] + "..."


def _shown(text: str) -> str:
    """What was given, in short; of an invite nothing, which holds a key."""
    text = re.sub(rf"{INVITE_PREFIX[:-2]}\S+.*", f"{INVITE_PREFIX}...", " ".join(text[:1000].split()))
    return repr(text if len(text) <= 60 else text[:57] + "...")
