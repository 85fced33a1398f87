"""Sends the parts of a model to the others of a group evenly, so that nobody is through long before the last one.

Each average waits for all senders of its part. TCP shares a line out unevenly among connections: left to it, one of the
others has all its parts when another one has half of them, and in the end the lines of most are idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Hashable, Mapping

import psutil

#: Parts by which a receiver may be ahead of the one that is furthest behind.
LEAD = 2

#: Seconds for which a part waits for others, at most: one who stands still is to keep nobody from being sent anything.
LONGEST_WAIT = 0.5


class FairSending:
    """How far a sender is with each of its receivers.

    :param counts: parts that each of them gets in all
    """

    def __init__(self, counts: Mapping[Hashable, int]):
        self._counts = {receiver: count for receiver, count in counts.items() if count > 0}
        self._sent = dict.fromkeys(self._counts, 0)
        self._moved = asyncio.Event()

    async def turn_of(self, receiver: Hashable) -> None:
        """Wait until the next part may be sent to a receiver, which counts as sent from then on."""
        if receiver not in self._sent:
            return
        end = time.monotonic() + LONGEST_WAIT
        while self.lead_of(receiver) >= LEAD and (seconds := end - time.monotonic()) > 0:
            waiting = asyncio.ensure_future(self._moved.wait())
            await asyncio.wait({waiting}, timeout=seconds)
            waiting.cancel()
        if receiver in self._sent:
            self._sent[receiver] += 1
        self._tell()

    def lead_of(self, receiver: Hashable) -> float:
        """Parts by which a receiver is ahead of the one that is furthest behind, by the shares of what each gets."""
        if receiver not in self._sent:
            return 0.0
        least = min(sent / self._counts[one] for one, sent in self._sent.items())
        return self._sent[receiver] - least * self._counts[receiver]

    def leave(self, receiver: Hashable) -> None:
        """Wait for a receiver no longer, which has got all or has gone."""
        if self._sent.pop(receiver, None) is not None:
            self._tell()

    def _tell(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()


# -- sending rate ----------------------------------------------------------------------------------------------------
#
# What a peer's line can send, as its rounds show it, so that a slow one averages less than the others.


#: Seconds between two looks at what was sent, and looks between which a rate counts: what a router's memory takes in
#: at once, a tenth of a second's worth and more, is no rate of its line.
LOOK_EVERY, LOOKS = 0.25, 4

#: Rounds whose highest rate counts: a line is not always used as far as it goes, and may become another one.
REMEMBERED = 8

#: Megabits a second up to which a rate says nothing of a line: so much is sent while a round waits for somebody.
SAYS_NOTHING = 0.5

_LOOPBACK = "lo"


class SendingRate:
    """The highest rate at which this machine has sent during the last rounds. In the averager's process.

    It is seen where the machine sends, whatever the transport, and whoever it is that sends: a line that others use,
    too, can do more for them than it now does. A round of little more than a second shows none, and
    needs none: nothing is looked at in most rounds.
    """

    def __init__(self) -> None:
        self._highest: deque[float] = deque(maxlen=REMEMBERED)

    @property
    def megabits(self) -> float | None:
        """In megabits a second; ``None`` where no round has shown it."""
        return max(self._highest, default=None)

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Look at what is sent during a round."""
        looking = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            looking.cancel()

    async def _watch(self) -> None:
        looks: deque[tuple[float, Mapping[str, int]]] = deque(maxlen=LOOKS + 1)
        highest = SAYS_NOTHING
        try:
            while True:
                await asyncio.sleep(LOOK_EVERY)
                looks.append((time.monotonic(), bytes_sent()))
                if len(looks) > LOOKS:
                    highest = max(highest, _rate(*looks[0], *looks[-1]))
        finally:
            if highest > SAYS_NOTHING:
                self._highest.append(highest)


def bytes_sent() -> Mapping[str, int]:
    """What each network interface of this machine has sent, but to the machine itself; nothing where none tells."""
    try:
        interfaces = psutil.net_io_counters(pernic=True)
    except OSError:  # not all sandboxes have the file
        return {}
    return {name: counters.bytes_sent for name, counters in interfaces.items() if name != _LOOPBACK}


def _rate(since: float, before: Mapping[str, int], until: float, after: Mapping[str, int]) -> float:
    """Megabits a second of the interface that has sent most; what a tunnel sends, another one sends again."""
    sent = max((count - before[name] for name, count in after.items() if name in before), default=0)
    return 8e-6 * sent / (until - since)
