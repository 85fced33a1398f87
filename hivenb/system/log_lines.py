"""The newest lines of a log, without what says nothing to the reader, and each once that comes again and again."""

from __future__ import annotations

import re
import time
from collections import deque
from dataclasses import dataclass

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
