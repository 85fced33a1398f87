"""When the swarm's present epoch is estimated to be over."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from hivemind.optim.progress_tracker import GlobalTrainingProgress, LocalTrainingProgress
from hivemind.utils import get_dht_time

#: Seconds; an estimate beyond this comes from a speed of nothing.
_ENDLESS = 1e6


def seconds_left(progress: GlobalTrainingProgress) -> float | None:
    """Seconds until the swarm's next epoch, as estimated by hivemind's tracker; ``None`` if it cannot be told."""
    eta = progress.eta_next_epoch - get_dht_time()
    return max(0.0, eta) if eta < _ENDLESS else None


@dataclass(frozen=True)
class Gathering:
    """How far a peer is, and how far it is reckoned to come before it has reported anew.

    :param samples: that it has by now
    :param samples_per_second: its speed
    :param most: samples that it is reckoned to gather without another report
    """

    samples: float
    samples_per_second: float
    most: float

    @property
    def seconds(self) -> float:
        """Until it has that many."""
        return (self.most - self.samples) / self.samples_per_second


def gathered_by(
    now: float, reports: Mapping[Any, LocalTrainingProgress], own_key: Any, epoch: int, target: float
) -> list[Gathering]:
    """How far those peers are.

    Nobody knows whether another one is as fast as it says: beyond what it has reported, it is reckoned with a share of
    the epoch as others have, so that whoever reports any speed ends nobody's epoch. One that gathers more in the time
    between two reports reports earlier, see :meth:`hivenb.engine.progress.pace.Pace.report_due_after`.

    :param now: by the clock of the DHT
    :param reports: by their public keys
    :param own_key: of this peer, which knows its speed
    :param epoch: of the swarm; those at another one have nothing for it yet
    :param target: samples of an epoch
    """
    found = []
    for key, report in reports.items():
        is_of_it = report.epoch == epoch
        reported = report.samples_accumulated if is_of_it else 0
        most = math.inf if key == own_key else reported + target / len(reports)
        since = max(0.0, now - report.time) * report.samples_per_second if is_of_it else 0.0
        found.append(Gathering(min(reported + since, most), report.samples_per_second, most))
    return found


def seconds_until(target: float, gathering: Iterable[Gathering]) -> float:
    """Seconds until peers together have so many samples; infinitely many if they never do."""
    peers = list(gathering)
    left = target - sum(one.samples for one in peers)
    growing = [one for one in peers if one.samples_per_second > 0 and one.most > one.samples]
    growing.sort(key=lambda one: one.seconds)
    speeds = list(accumulate(one.samples_per_second for one in reversed(growing)))[::-1]
    elapsed = 0.0
    for one, speed in zip(growing, speeds, strict=True):
        if left <= speed * (one.seconds - elapsed):
            return max(0.0, elapsed + left / speed)
        left -= speed * (one.seconds - elapsed)
        elapsed = one.seconds
    return 0.0 if left <= 0 else math.inf
