"""The lines of a log that are kept: which say nothing, which are counted only, and how many of a kind there may be."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

# -- log lines -------------------------------------------------------------------------------------------------------
#
# The newest lines of a log, without what says nothing to the reader, and each once that comes again and again.


#: Lines kept; the oldest go first.
CAPACITY = 1000

#: Seconds for which a line that comes again is counted instead of written anew.
_COUNTED_FOR = 60.0

#: What hivemind's averagers say whenever one round is scheduled while another one is looked for, which is how rounds
#: in the background work; and what Lightning advertises.
_NOISE = (
    "Another look_for_group is already in progress",
    "For seamless cloud logging and experiment tracking",
    # what a run does on purpose when it was stopped in the middle of a pass: as many batches follow as were left
    "You're resuming from a checkpoint that ended before the epoch ended",
    # another start, which goes on with the model's own weights, from a file that nobody has named
    "/resume.ckpt",
)

_CLOCK = re.compile(r"(\d\d:\d\d:\d\d) (.*)", re.DOTALL)


@dataclass
class _Line:
    clock: str
    text: str
    began: float
    count: int = 1
    last: str = ""

    def __str__(self) -> str:
        line = f"{self.clock} {self.text}".lstrip()
        if self.count == 1:
            return line
        return f"{line} ({self.count:,} times{f', until {self.last}' if self.last not in ('', self.clock) else ''})"


class LogLines:
    """Keeps the newest lines. Whoever adds holds a lock; anybody may read.

    :param capacity: how many
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._lines: deque[_Line] = deque(maxlen=capacity)
        self._newest: dict[str, _Line] = {}

    def add(self, line: str) -> bool:
        """Keep a line, which may begin with the time of day.

        :returns: whether it is new; one that was there a moment ago is only counted
        """
        found = _CLOCK.match(line)
        clock, text = found.groups() if found else ("", line)
        now, known = time.monotonic(), self._newest.get(text)
        if known is not None and now - known.began <= _COUNTED_FOR:
            known.count, known.last = known.count + 1, clock
            return False
        if len(self._lines) == self._lines.maxlen and self._newest.get(self._lines[0].text) is self._lines[0]:
            del self._newest[self._lines[0].text]
        self._newest[text] = _Line(clock, text, now)
        self._lines.append(self._newest[text])
        return True

    def tail(self, count: int) -> tuple[str, ...]:
        """The newest lines, oldest first."""
        lines = tuple(self._lines.copy())
        return tuple(str(line) for line in lines[-count:]) if count > 0 else ()


def is_noise(text: str) -> bool:
    """Whether a message is of no use to whoever reads the log."""
    return any(noise in text for noise in _NOISE)


def is_deprecation_in_a_library(category: type[Warning], filename: str) -> bool:
    """Whether a warning tells the authors of an installed package, and not the reader, to change their code."""
    deprecations = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)
    return issubclass(category, deprecations) and ("site-packages" in filename or "dist-packages" in filename)


def is_hint(category: type[Warning]) -> bool:
    """Whether a warning tells by its kind of what may well be meant, as Lightning's ``PossibleUserWarning`` does.

    There is one at each start of whoever has a ``validation_step`` and trains without validating.
    """
    return any(base.__name__ == "PossibleUserWarning" for base in category.__mro__)


# -- log rate --------------------------------------------------------------------------------------------------------
#
# How many lines of a kind a log takes: what others send must not push out what a person has to read.


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
