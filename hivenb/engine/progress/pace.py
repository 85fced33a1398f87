"""How often a peer looks at the swarm, reports itself, and asks who is there: the more peers, the more seldom."""

from __future__ import annotations

from dataclasses import dataclass

from hivemind.optim.progress_tracker import LocalTrainingProgress

#: Seconds between two looks at least for each peer that is there: each has all their reports checked by the others.
LOOK_PERIOD_OF_PEER = 0.05

#: Seconds between two looks at most: a newcomer is to be seen before its second epoch (hivemind's own is 10).
MAX_REFRESH_PERIOD = 3.0

#: Seconds between two reports of one epoch, at least. The others know the speed of this peer and reckon with it
#: meanwhile: it reports early only when they are misled.
MISLED, AS_RECKONED = 0.1, 1.0

#: Seconds of this peer's work by which it may be ahead of what the others reckon with, or behind.
MISLED_BY = 0.1

#: Seconds by which a report may be late, at least, before its peer is asked whether it is there.
LATE = 0.2


@dataclass(frozen=True)
class Pace:
    """Of each peer, so that what reports cost it does not grow with the swarm.

    :param peers: that there are
    """

    peers: int = 1

    @property
    def look_period(self) -> float:
        """Seconds between two looks at least."""
        return min(LOOK_PERIOD_OF_PEER * self.peers, MAX_REFRESH_PERIOD)

    @property
    def report_period(self) -> float:
        """Seconds between two reports of one epoch, if all goes as the others reckon: one for each of their looks."""
        return max(AS_RECKONED, self.look_period)

    @property
    def silence(self) -> float:
        """Seconds without a new report after which a peer is asked whether it is there."""
        return self.report_period + max(LATE, self.look_period / 2)

    def report_due_after(self, now: LocalTrainingProgress, reported: LocalTrainingProgress) -> float:
        """Seconds from a report to the next one, if nothing happens in between.

        :param now: how far the peer is
        :param reported: what the others know of it
        """
        if now.epoch != reported.epoch:
            return 0.0
        reckoned = reported.samples_accumulated + (now.time - reported.time) * reported.samples_per_second
        is_misled = abs(now.samples_accumulated - reckoned) > MISLED_BY * now.samples_per_second
        return max(MISLED, self.look_period / 2) if is_misled else self.report_period
