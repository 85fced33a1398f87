"""What a chart is drawn against: time, epochs of the swarm, or samples of this peer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hivenb.figures.history import Snapshot

AXES = ("time", "epochs", "samples")

ToAxis = Callable[[np.ndarray], np.ndarray]


def to_axis(snapshot: Snapshot, axis: str) -> ToAxis:
    """A function from seconds since the run's first record to epochs or samples, as the training loss tells them.

    Between two changes of the epoch it goes on evenly. Without a loss everything is at 0.

    :param snapshot: of the run's history
    :param axis: one of :data:`AXES`
    """
    if axis == "time":
        return lambda times: times
    loss = snapshot.series.get("loss")
    if loss is None or len(loss) == 0:
        return np.zeros_like
    if axis == "samples":
        samples = np.maximum.accumulate(loss.samples).astype(float)
        return lambda times: np.interp(times, loss.times, samples)
    epochs = np.maximum.accumulate(loss.epochs)
    changes = np.append(0, np.flatnonzero(np.diff(epochs)) + 1)
    places, values = loss.times[changes], epochs[changes].astype(float)
    # the last epoch has not ended: as fast as the one before, but not to its end
    rate = (values[-1] - values[-2]) / max(places[-1] - places[-2], 1e-9) if len(changes) > 1 else 0.0
    lasted = loss.times[-1] - places[-1]
    places, values = np.append(places, loss.times[-1]), np.append(values, values[-1] + min(0.95, rate * lasted))
    return lambda times: np.interp(times, places, values)


def to_time(snapshot: Snapshot, axis: str, place: float) -> float:
    """Seconds since the run's first record at a place on an axis: the other way round.

    :param snapshot: of the run's history
    :param axis: one of :data:`AXES`
    :param place: epochs or samples; beyond what there is, the time of the first or the last of it
    """
    loss = snapshot.series.get("loss")
    if axis == "time" or loss is None or len(loss) == 0:
        return place
    return float(np.interp(place, to_axis(snapshot, axis)(loss.times), loss.times))
