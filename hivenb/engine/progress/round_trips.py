"""How long a peer's answers take, smoothed as TCP smooths it (RFC 6298), so that deadlines follow the line."""

from __future__ import annotations

from dataclasses import dataclass

#: Weights of the newest answer, in what is usual and in how far answers are from that.
_ALPHA, _BETA = 1 / 8, 1 / 4

#: Deviations beyond the usual that an answer may take.
_DEVIATIONS = 4


@dataclass
class RoundTrips:
    """Of one peer.

    :param usual: seconds from a question to its answer; 0 before the first
    :param deviation: seconds by which answers are usually earlier or later
    """

    usual: float = 0.0
    deviation: float = 0.0

    def note(self, seconds: float) -> None:
        """Know how long an answer took."""
        if self.usual == 0:
            self.usual, self.deviation = seconds, seconds / 2
            return
        self.deviation += _BETA * (abs(seconds - self.usual) - self.deviation)
        self.usual += _ALPHA * (seconds - self.usual)

    @property
    def longest(self) -> float:
        """Seconds within which an answer comes as long as nothing gets lost; 0 before the first."""
        return self.usual + _DEVIATIONS * self.deviation
