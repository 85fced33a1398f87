"""What whoever opens a private swarm chooses or is given: who knows it decides who is let in."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Any

from hivenb.errors import SwarmError

#: Characters that a secret has at least. An invite tells a public key made of it, against which guesses can be tried.
LEAST_CHARACTERS = 32


class Secret:
    """What makes a peer an authority of a private swarm, which lets others in. It is not shown by accident.

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
