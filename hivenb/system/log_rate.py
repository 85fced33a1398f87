"""How many lines of a kind a log takes: what others send must not push out what a person has to read."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

#: Lines of a kind in a row.
AT_ONCE = 100

#: Seconds for each further one.
PERIOD = 2.0

#: Kinds that are remembered; a line of one that is not is the first of its kind.
MOST_KINDS = 512

#: What differs in lines of a kind: numbers, ids of peers, and what stands between quotation marks.
_PARTICULARS = re.compile(r"'[^']*'|\"[^\"]*\"|b'|\b\w*\d\w*\b")

#: Characters that tell a kind from another.
_SAME = 60


@dataclass
class _Kind:
    paid_until: float
    left_out: int = 0


class LogRate:
    """Says which lines are too many of their kind. Whoever asks holds a lock.

    :param clock: tells the time, in seconds
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._kinds: dict[str, _Kind] = {}

    def admits(self, text: str) -> str | None:
        """A line as it is to be written, with the number of those that were left out before it.

        :param text: the line, without the time of day
        :returns: ``None`` if it is to be left out
        """
        now, name = self._clock(), _PARTICULARS.sub("#", text[:1000])[:_SAME]
        known = self._kinds.pop(name, None) or _Kind(now)
        self._kinds[name] = known  # those that have not come for longest go first
        if len(self._kinds) > MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]
        if known.paid_until - now >= AT_ONCE * PERIOD:
            known.left_out += 1
            return None
        known.paid_until = max(known.paid_until, now) + PERIOD
        if not (left_out := known.left_out):
            return text
        known.left_out = 0
        return f"{text} (and {left_out:,} more like it)"
