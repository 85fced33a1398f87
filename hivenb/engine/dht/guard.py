"""Who knows a swarm's secret, and how peers prove to each other that they do.

Each request and each stream begins with a message authentication code (HMAC-SHA256, RFC 2104) of the caller's and the
callee's peer ids, and so does what comes back. libp2p authenticates both ids: a code that was overheard, or given to a
stranger who holds a peer's address, is of no use to anybody else, and needs no nonce.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from functools import lru_cache
from typing import Any

from hivemind.p2p import PeerID

from hivenb.errors import SwarmError

#: Characters that a secret has at least. Whoever is called gets a code to try guesses against, as fast as he can.
LEAST_CHARACTERS = 32

#: Bytes of a code.
PROOF_BYTES = 32

#: Codes that a peer keeps, of as many others with whom it talks.
_KEPT_PROOFS = 4096


class Secret:
    """What all peers of a private swarm know and nobody else does. It is not shown by accident.

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
        """The text, for an invite or the environment of another peer."""
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


class Guard:
    """Proves that a peer knows a secret, and finds out whether others do.

    :param secret: of the swarm
    :param own_id: of this peer
    """

    def __init__(self, secret: Secret, own_id: PeerID):
        self._key, self._own = secret.key, own_id.to_bytes()
        self._proof = lru_cache(_KEPT_PROOFS)(self._make_proof)

    def of_call(self, callee: PeerID) -> bytes:
        """What this peer puts before what it sends to a peer that it calls."""
        return self._proof(b"call", self._own, callee.to_bytes())

    def of_answer(self, caller: PeerID) -> bytes:
        """What this peer puts before what it answers to a caller."""
        return self._proof(b"answer", caller.to_bytes(), self._own)

    def admits_call(self, proof: bytes, caller: PeerID) -> bool:
        """Whether a caller has proven that it knows the secret."""
        return hmac.compare_digest(proof, self._proof(b"call", caller.to_bytes(), self._own))

    def admits_answer(self, proof: bytes, callee: PeerID) -> bool:
        """Whether a peer that was called has proven that it knows the secret."""
        return hmac.compare_digest(proof, self._proof(b"answer", self._own, callee.to_bytes()))

    def _make_proof(self, part: bytes, caller: bytes, callee: bytes) -> bytes:
        # the lengths, so that no two pairs of ids are the same message
        sizes = len(caller).to_bytes(2, "big") + len(callee).to_bytes(2, "big")
        return hmac.digest(self._key, b"hivenb guard 1 " + part + sizes + caller + callee, "sha256")
