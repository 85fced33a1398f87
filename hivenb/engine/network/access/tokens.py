"""Invites and credentials of a private swarm: who may issue them, and how anybody tells a good credential from others.

The swarm's *admin* is an Ed25519 key pair that follows from its secret. It signs the public key of each invite, and
until when that is good. Whoever has the invite signs the own peer id with its private key. Both signatures are a
credential. libp2p authenticates the id: a credential that was overheard, or given to a stranger, is of no use to
anybody else.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from hivenb.errors import SwarmError

# -- secret ----------------------------------------------------------------------------------------------------------
#
# What whoever opens a private swarm chooses or is given: who knows it decides who is let in.


#: Characters that a secret has at least. An invite tells a public key made of it, against which guesses can be tried.
LEAST_CHARACTERS = 32


class Secret:
    """What makes a peer an admin of a private swarm, which lets others in. It is not shown by accident.

    :param text: at least :data:`LEAST_CHARACTERS` characters, at random
    :raises SwarmError: if it is shorter, or no text
    """

    __slots__ = ("_text",)

    def __init__(self, text: str):
        if not isinstance(text, str):
            raise SwarmError(f"a secret is a text, and not a {type(text).__name__}; {_HOW_TO_MAKE_ONE}")
        if len(text.strip()) < LEAST_CHARACTERS:
            raise SwarmError(
                f"a secret has at least {LEAST_CHARACTERS} characters, and this one has {len(text.strip())}, which "
                f"can be guessed; {_HOW_TO_MAKE_ONE}"
            )
        self._text = text.strip()

    @classmethod
    def random(cls) -> Secret:
        """A new one, of 256 bits."""
        return cls(secrets.token_urlsafe(32))

    def reveal(self) -> str:
        """The text, for the environment of another peer."""
        return self._text

    @property
    def key(self) -> bytes:
        """32 bytes."""
        return hashlib.sha256(b"hivenb swarm secret 1:" + self._text.encode()).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._text.encode(), other._text.encode())

    def __hash__(self) -> int:
        return hash(self._text)

    def __repr__(self) -> str:
        return "<a secret>"

    def __reduce__(self) -> Any:
        return Secret, (self._text,)


_HOW_TO_MAKE_ONE = "make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"


def as_secret(given: Secret | str | None) -> Secret | None:
    """A secret out of what was given for one; ``None`` for none.

    :raises SwarmError: if that can be guessed
    """
    return given if given is None or isinstance(given, Secret) else Secret(given)


# -- credentials -------------------------------------------------------------------------------------------------------


#: Bytes of a key, of a signature, and of the second in which an invite expires.
KEY_BYTES, SIGNATURE_BYTES, TIME_BYTES = 32, 64, 8

#: Bytes of a credential: the invite's public key, its expiry, and the signatures of the admin and of the invite.
CREDENTIAL_BYTES = KEY_BYTES + TIME_BYTES + 2 * SIGNATURE_BYTES

#: Bytes of an invite's key as it travels in an invite.
PACKED_BYTES = 2 * KEY_BYTES + TIME_BYTES + SIGNATURE_BYTES

#: When an invite expires that does not.
NEVER = 2 ** (8 * TIME_BYTES) - 1

# what each signature begins with, so that none of them is good for another purpose
_ADMIN, _INVITE, _CREDENTIAL = b"hivenb admin 1:", b"hivenb invite 1:", b"hivenb credential 1:"


def is_signed(public_key: bytes, statement: bytes, signature: bytes) -> bool:
    """Whether the holder of a private key has signed something; false for what is no key, too."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, statement)
    except (InvalidSignature, ValueError):
        return False
    return True


def _public_of(seed: bytes) -> bytes:
    raw = serialization.Encoding.Raw
    return Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes(raw, serialization.PublicFormat.Raw)


@dataclass(frozen=True, repr=False)
class InviteKey:
    """What is in an invite and lets its holder in. It is not shown by accident.

    :param admin: public key of the swarm's admin
    :param seed: the private key
    :param expires: second since 1970 from which on it is good for nothing; :data:`NEVER` if there is none
    :param signature: of the admin, over the public key and ``expires``
    """

    admin: bytes
    seed: bytes
    expires: int
    signature: bytes

    @cached_property
    def public(self) -> bytes:
        """The public key, by which it is known to everybody."""
        return _public_of(self.seed)

    @property
    def has_expired(self) -> bool:
        """Whether it is good for nothing any more."""
        return self.expires <= time.time()

    def credential_of(self, peer_id: bytes) -> bytes:
        """The credential of a peer."""
        signature = Ed25519PrivateKey.from_private_bytes(self.seed).sign(_CREDENTIAL + peer_id)
        return self.public + self.expires.to_bytes(TIME_BYTES, "big") + self.signature + signature

    def pack(self) -> bytes:
        """All of it, for an invite."""
        return self.admin + self.seed + self.expires.to_bytes(TIME_BYTES, "big") + self.signature

    @classmethod
    def unpack(cls, packed: bytes) -> InviteKey:
        """The inverse of :meth:`pack`.

        :raises ValueError: if it is damaged, or no admin has signed it
        """
        if len(packed) != PACKED_BYTES:
            raise ValueError(f"it has {len(packed)} bytes instead of {PACKED_BYTES}")
        keys, rest = 2 * KEY_BYTES, packed[2 * KEY_BYTES :]
        expires = int.from_bytes(rest[:TIME_BYTES], "big")
        made = cls(packed[:KEY_BYTES], packed[KEY_BYTES:keys], expires, rest[TIME_BYTES:])
        if not is_signed(made.admin, _invite(made.public, rest[:TIME_BYTES]), made.signature):
            raise ValueError("its signature is wrong")
        return made

    def __repr__(self) -> str:
        return "<the key of an invite>"


class Admin:
    """Whoever knows a swarm's secret: issues invites, and bans peers.

    :param secret: of the swarm
    """

    def __init__(self, secret: Secret):
        self._seed = hashlib.sha256(_ADMIN + secret.key).digest()
        #: the key by which all members know it
        self.public = _public_of(self._seed)

    def new_invite(self, expires: int = NEVER) -> InviteKey:
        """A key for an invite, which no other invite has.

        :param expires: second since 1970 until when it is good
        """
        seed = secrets.token_bytes(KEY_BYTES)
        signature = self.sign(_invite(_public_of(seed), expires.to_bytes(TIME_BYTES, "big")))
        return InviteKey(self.public, seed, expires, signature)

    def sign(self, statement: bytes) -> bytes:
        """A signature over a statement, which says for what it is good."""
        return Ed25519PrivateKey.from_private_bytes(self._seed).sign(statement)


def _invite(public: bytes, expires: bytes) -> bytes:
    return _INVITE + public + expires


@dataclass(frozen=True)
class Credential:
    """What a peer has shown, and is its own.

    :param key: public key of the invite that it came by
    :param expires: second since 1970 from which on it is good for nothing
    """

    key: bytes
    expires: int


def read_credential(shown: bytes, peer_id: bytes, admin: bytes) -> Credential | None:
    """The credential that a peer shows; ``None`` for anything else. It may have expired.

    :param shown: any bytes
    :param peer_id: of who shows them, as libp2p has authenticated it
    :param admin: public key of the swarm's admin
    """
    if len(shown) != CREDENTIAL_BYTES:
        return None
    start = KEY_BYTES + TIME_BYTES
    key, expires = shown[:KEY_BYTES], shown[KEY_BYTES:start]
    if not is_signed(admin, _invite(key, expires), shown[start : start + SIGNATURE_BYTES]):
        return None
    if not is_signed(key, _CREDENTIAL + peer_id, shown[start + SIGNATURE_BYTES :]):
        return None
    return Credential(key, int.from_bytes(expires, "big"))


@dataclass(frozen=True)
class Membership:
    """Why a peer is let in.

    :param key: that it makes its credential with
    :param secret: of the swarm, if it knows that, and so is an admin
    """

    key: InviteKey
    secret: Secret | None = None


def membership_of(given: Secret | InviteKey | str | None) -> Membership | None:
    """The membership of whoever has a secret, or the key of an invite; ``None`` for who has neither.

    :raises SwarmError: if a secret can be guessed
    """
    if given is None:
        return None
    if isinstance(given, InviteKey):
        return Membership(given)
    secret = given if isinstance(given, Secret) else Secret(given)
    return Membership(Admin(secret).new_invite(), secret)
