"""One attack on a living swarm, and the defence that it is to break on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """What has become of the victims.

    :param held: whether the attack did no harm
    :param figure: what was measured, in a few words
    """

    held: bool
    figure: str


@dataclass(frozen=True)
class Attack:
    """An attack that is tried twice, each time in a process of its own: with the defence, and without that one.

    :param name: in a few words with hyphens
    :param about: what the attacker does, in one sentence
    :param disarm: takes the defence away in this process, before anything is started: what is forked later lacks it
    :param attempt: starts real victims and the attacker, ends them all, and tells
    :param seconds: that an attempt may take
    """

    name: str
    about: str
    disarm: Callable[[], None]
    attempt: Callable[[], Outcome]
    seconds: float = 120.0
