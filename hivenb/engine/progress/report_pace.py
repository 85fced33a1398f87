"""When a peer reports itself: seldom, and early where the others would reckon with it wrongly meanwhile."""

from __future__ import annotations

from hivemind.optim.progress_tracker import LocalTrainingProgress

#: Seconds between two reports of one epoch, of which all peers' DHTs check the signature. The others know the speed of
#: this peer and reckon with it meanwhile: it reports early only when they are misled.
MISLED, AS_RECKONED = 0.1, 1.0

#: Seconds of this peer's work by which it may be ahead of what the others reckon with, or behind.
MISLED_BY = 0.1


def due_after(now: LocalTrainingProgress, reported: LocalTrainingProgress) -> float:
    """Seconds from a report to the next one, if nothing happens in between.

    :param now: how far the peer is
    :param reported: what the others know of it
    """
    if now.epoch != reported.epoch:
        return 0.0
    reckoned = reported.samples_accumulated + (now.time - reported.time) * reported.samples_per_second
    is_misled = abs(now.samples_accumulated - reckoned) > MISLED_BY * now.samples_per_second
    return MISLED if is_misled else AS_RECKONED
