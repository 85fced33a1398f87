"""How long a peer's answers take, smoothed as TCP smooths it (RFC 6298), so that deadlines follow the line."""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Weights of the newest answer, in what is usual and in how far answers are from that.
_ALPHA, _BETA = 1 / 8, 1 / 4

#: Deviations beyond the usual that an answer may take.
_DEVIATIONS = 4

#: Answers after which the quickest one is not of a busy moment, or of a connection that was only made for it.
ENOUGH = 3


@dataclass
class RoundTrips:
    """Of one peer.

    :param usual: seconds from a question to its answer; 0 before the first
    :param deviation: seconds by which answers are usually earlier or later
    :param least: seconds of the quickest answer
    :param count: of answers
    """

    usual: float = 0.0
    deviation: float = 0.0
    least: float = math.inf
    count: int = 0

    def note(self, seconds: float) -> None:
        """Know how long an answer took."""
        self.count += 1
        self.least = min(self.least, seconds)
        if self.usual == 0:
            self.usual, self.deviation = seconds, seconds / 2
            return
        self.deviation += _BETA * (abs(seconds - self.usual) - self.deviation)
        self.usual += _ALPHA * (seconds - self.usual)

    @property
    def longest(self) -> float:
        """Seconds within which an answer comes as long as nothing gets lost; 0 before the first."""
        return self.usual + _DEVIATIONS * self.deviation

    @property
    def is_known(self) -> bool:
        """Whether there were answers enough to tell the length of the line."""
        return self.count >= ENOUGH

    @property
    def line(self) -> float:
        """Seconds there and back on the line itself; 0 as long as it is not known."""
        return self.least if self.is_known else 0.0
