"""How long a node waits for another one's answer: longer where the last answers took long.

A round fills a line, and what is asked meanwhile stands behind megabytes that the system has taken to send them: on 10
megabits a second for some seconds, there and back. hivemind waits for three, strikes the other one off, and each peer
would train alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from hivemind.p2p import PeerID

#: How many times the longest of the last answers one may take, beyond what is allowed in any case.
TIMES_AS_LONG = 2.0

#: Seconds beyond that, at most.
LONGEST = 12.0

#: Share of the longest answer that is left of it with each one that is shorter.
FADES = 0.8

#: Peers of whom that is known, at most: those asked last.
MOST_KNOWN = 1024


class Patience:
    """How long the last answers of each peer took. For one event loop."""

    def __init__(self) -> None:
        self._longest: dict[PeerID, float] = {}
        #: for how long those were waited for in vain that have not answered since
        self._in_vain: dict[PeerID, float] = {}

    def beyond(self, peer: PeerID) -> float:
        """Seconds that an answer of a peer may take, by its last ones, beyond what is allowed in any case."""
        return min(TIMES_AS_LONG * self._longest.get(peer, 0.0), LONGEST)

    def to_find_again(self, peer: PeerID) -> float:
        """The same where nothing else waits: whoever did not answer in time may do so in more."""
        return max(self.beyond(peer), self._in_vain.get(peer, 0.0))

    async def wait_for(self, peer: PeerID, call: Callable[..., Awaitable[Any]], timeout: float) -> Any:
        """What a peer answers.

        :param call: asks it; takes ``timeout``
        :param timeout: seconds
        :raises TimeoutError: if there is no answer in time
        """
        began = time.monotonic()
        try:
            answer = await call(timeout=timeout)
        except asyncio.TimeoutError:
            _put(self._in_vain, peer, min(timeout, LONGEST))
            raise
        _put(self._longest, peer, max(time.monotonic() - began, FADES * self._longest.get(peer, 0.0)))
        self._in_vain.pop(peer, None)
        return answer


def _put(known: dict[PeerID, float], peer: PeerID, seconds: float) -> None:
    known.pop(peer, None)
    known[peer] = seconds
    if len(known) > MOST_KNOWN:
        del known[next(iter(known))]


class PatientStub:
    """Remote calls to one peer that are given time by how long its last answers took.

    :param stub: of hivemind's, whose calls have one answer each
    """

    def __init__(self, stub: Any, peer: PeerID, patience: Patience):
        self._stub, self._peer, self._patience = stub, peer, patience

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        call = getattr(self._stub, name)

        async def ask(request: Any, timeout: float) -> Any:
            # those who were struck off are pinged; values are asked for, and stored, where somebody waits
            beyond = self._patience.to_find_again if name == "rpc_ping" else self._patience.beyond
            return await self._patience.wait_for(self._peer, partial(call, request), timeout + beyond(self._peer))

        return ask
