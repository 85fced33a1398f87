"""One place at which hivenb reads what others have written, and how an input is made of a fuzzer's bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Target:
    """What is fed.

    :param name: in a few words with hyphens; its corpus is in the folder of that name
    :param about: what is read there, in one sentence
    :param feed: reads one input. What it raises is a finding; what the callers of the code expect, it catches itself
    :param longest: bytes of an input
    """

    name: str
    about: str
    feed: Callable[[bytes], None]
    longest: int = 1024


class Choices:
    """An input as a row of choices, so that bytes that a fuzzer turns make another message and no broken one.

    When its bytes are used up, all further choices are the first ones.
    """

    def __init__(self, data: bytes):
        self._data, self._at = data, 0

    def raw(self, count: int) -> bytes:
        """The next bytes, fewer at the end."""
        start = self._at
        self._at = min(start + count, len(self._data))
        return self._data[start : self._at]

    def rest(self) -> bytes:
        """All that are left."""
        return self.raw(len(self._data))

    def text(self, count: int = 40) -> str:
        """A short text, of one byte's length at most."""
        return self.raw(self.number(count)).decode("utf-8", "replace")

    def number(self, below: int) -> int:
        """One of at most 256 numbers."""
        return (self.raw(1) or b"\0")[0] % below

    def of(self, options: Sequence[T]) -> T:
        """One of several."""
        return options[self.number(len(options))]

    def now_and_then(self) -> bool:
        """True once in eight times, never at the end."""
        return self.number(8) == 7
