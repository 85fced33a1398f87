"""One fault that happens to a living swarm, and what must have become of the swarm afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from faults.field import Field


class BrokeError(AssertionError):
    """The swarm has not withstood a fault; the message says in what."""


@dataclass(frozen=True)
class Fault:
    """A fault that is injected into a swarm of three real peers.

    :param name: in a few words with hyphens
    :param about: what happens, in one sentence
    :param inject: does it, at a moment that it chooses, and replaces whoever has died; returns a few words on what it
      has seen. Whether the swarm has withstood it is checked afterwards: see :meth:`faults.field.Field.check`
    :param repeats: whether one swarm can take it many times in a row
    :param seconds: that it may take, the check included
    :param why_not: says why it cannot be tried on this machine, or nothing
    """

    name: str
    about: str
    inject: Callable[[Field, Random], str]
    repeats: bool = True
    seconds: float = 240.0
    why_not: Callable[[], str | None] = lambda: None
