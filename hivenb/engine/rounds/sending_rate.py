"""What a peer's line can send, as its rounds show it, so that a slow one averages less than the others."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping

import psutil

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
    too, can do more for them than it now does. A round of less than a second shows none, and needs none.
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
        looks = deque([(time.monotonic(), bytes_sent())], maxlen=LOOKS + 1)
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
