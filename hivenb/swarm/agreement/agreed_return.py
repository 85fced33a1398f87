"""What all peers of a run do together when its loss has exploded: they return to a state that was good."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Epochs beyond which a number is none of a swarm's.
_MOST_EPOCHS = 2**53


@dataclass(frozen=True)
class Return:
    """A return that the host has decided on.

    :param to: the epoch of the swarm whose state all peers return to
    :param at: the epoch at which they go on with it
    """

    to: int
    at: int

    def pack(self) -> list[int]:
        """As it travels."""
        return [self.to, self.at]

    @classmethod
    def parse(cls, value: Any) -> Return | None:
        """A return as it has travelled; ``None`` for none.

        :raises ValueError: if it is none at all
        """
        if value is None:
            return None
        if not (isinstance(value, list) and len(value) == 2 and all(type(epoch) is int for epoch in value)):
            raise ValueError(f"{value!r:.100} is no return to an earlier state")
        to, at = value
        if not 0 <= to <= at < _MOST_EPOCHS:
            raise ValueError(f"nobody can return from epoch {at} to the state of epoch {to}")
        return cls(to, at)
