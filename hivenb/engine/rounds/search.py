"""A search for a group, as the peer that searches sees it: what it costs, and which leaders have let it wait."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.matchmaking import MatchmakingException
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time

#: Times in a search that a leader is asked which does not answer; two that ask each other let each other wait once.
ASKED_IN_VAIN = 2

#: Seconds after which a request that is given up is cancelled once more.
LOOKED_AT_EVERY = 0.1

#: What hivemind raises where a leader's answer is of no use.
_USELESS = (AssertionError, MatchmakingException, TypeError, ValueError)


class Waiting:
    """How long a peer's training has waited for a search: it goes on meanwhile until the round is due.

    :param step: the round, in the averager's process, before the search begins
    """

    def __init__(self, step: StepControl):
        self._began = time.monotonic()
        self._due: float | None = None
        step._trigger.add_done_callback(self._note_due)

    def _note_due(self, trigger: object) -> None:
        self._due = time.monotonic()

    @property
    def seconds(self) -> float:
        """Until now; 0 before the round is due."""
        return 0.0 if self._due is None else time.monotonic() - max(self._began, self._due)


@dataclass
class Request:
    """To be let into a leader's group.

    :param leader: who is asked
    :param until: when it is to begin, by the clock of the DHT
    :param timeout: seconds for its answer, and for its beginning
    :param began: when it was asked
    :param was_welcome: whether it has let this peer in, and has not sent it on to another leader
    """

    leaders: LeadersOfASearch
    leader: PeerID
    until: float
    timeout: float
    began: float
    was_welcome: bool = False

    def stalled_for(self, following: asyncio.Task[GroupInfo | None]) -> float | None:
        """Seconds for which the leader has let this peer wait for nothing; ``None`` if it has not.

        :param following: the request, which is over
        """
        seconds = time.monotonic() - self.began
        error = following.exception()
        if isinstance(error, _USELESS):
            self.leaders.give_up(self.leader)
            return seconds
        if isinstance(error, OSError):  # of the stream, which the leader may have broken off
            return None if self.leaders.note_silence(self.leader) else seconds
        if error is not None or following.result() is not None:
            return None
        if self.was_welcome and get_dht_time() >= self.until + self.timeout:
            self.leaders.give_up(self.leader)
            return seconds
        if not self.was_welcome and seconds >= self.timeout and not self.leaders.note_silence(self.leader):
            return seconds
        return None


class LeadersOfASearch:
    """The leaders that were asked in the search for one round.

    :param step: the round
    """

    def __init__(self, step: StepControl | None = None):
        self.step = step
        self._silent: Counter[PeerID] = Counter()
        self._request: Request | None = None

    def may_be_asked(self, leader: PeerID) -> bool:
        """Whether it has not let this peer wait in vain."""
        return self._silent[leader] < ASKED_IN_VAIN

    def ask(self, leader: PeerID, until: float, timeout: float) -> Request:
        """Note that a leader is asked; the one before has sent this peer on to it, if it was welcome there."""
        if self._request is not None:
            self._request.was_welcome, self._request.began = False, time.monotonic()
        self._request = Request(self, leader, until, timeout, time.monotonic())
        return self._request

    def note_welcome(self, leader: PeerID) -> None:
        """A leader has let this peer into its group."""
        if self._request is not None and self._request.leader == leader:
            self._request.was_welcome = True

    def note_silence(self, leader: PeerID) -> bool:
        """A leader has not answered. Whether it may be asked again."""
        self._silent[leader] += 1
        return self.may_be_asked(leader)

    def give_up(self, leader: PeerID) -> None:
        """Do not ask a leader again in this search."""
        self._silent[leader] = ASKED_IN_VAIN


async def give_up(following: asyncio.Task[Any]) -> None:
    """Cancel it until it has ended, whoever gives up waiting for that meanwhile.

    Before Python 3.12, ``asyncio.wait_for`` forgets that it was cancelled if what it waits for has arrived at that
    moment; a peer would search on, and no later search of its would ever begin.
    """
    is_cancelled = False
    while not following.done():
        following.cancel()
        try:
            await asyncio.wait({following}, timeout=LOOKED_AT_EVERY)
        except asyncio.CancelledError:
            is_cancelled = True
    if not following.cancelled():
        following.exception()  # else asyncio complains that nobody has asked for it
    if is_cancelled:
        raise asyncio.CancelledError
