"""When the swarm's present epoch is estimated to be over."""

from __future__ import annotations

from hivemind.optim.progress_tracker import GlobalTrainingProgress
from hivemind.utils import get_dht_time

#: Seconds; an estimate beyond this comes from a speed of nothing.
_ENDLESS = 1e6


def seconds_left(progress: GlobalTrainingProgress) -> float | None:
    """Seconds until the swarm's next epoch, as estimated by hivemind's tracker; ``None`` if it cannot be told."""
    eta = progress.eta_next_epoch - get_dht_time()
    return max(0.0, eta) if eta < _ENDLESS else None
