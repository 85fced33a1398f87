"""How long a run has trained, and how far it is on the way to the end that was set for it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hivenb.errors import TrainingError

if TYPE_CHECKING:
    from hivenb.figures.history import Event, Snapshot


#: Before this share of the whole is done, what is left cannot be told from it.
_TOO_EARLY = 0.02

_BEGINS, _ENDS = ("started", "resumed"), ("paused", "stopped", "finished", "failed")


@dataclass(frozen=True)
class Length:
    """The length of a run at one moment.

    :param seconds: that it has trained, from each start to the stop after it, without pauses
    :param done: passes over this peer's data, or batches, that are done, as ``unit`` says
    :param goal: of how many, by ``max_epochs`` or ``max_steps`` of the Trainer; ``None`` for no end
    :param unit: ``"pass"`` or ``"batch"``
    :param seconds_left: to that end, at the pace until now; ``None`` if it cannot be told
    """

    seconds: float = 0.0
    done: int = 0
    goal: int | None = None
    unit: str = "pass"
    seconds_left: float | None = None


def length_of(trainer: Any, snapshot: Snapshot, is_active: bool) -> Length:
    """The length of a run. Cheap: asks neither the data nor the device.

    :param trainer: Lightning's; ``None`` before the first start
    :param snapshot: of the run's history
    :param is_active: whether it trains, or is about to
    """
    now = time.time() - snapshot.started_at
    seconds = float(math.floor(trained_seconds(snapshot.events, now if is_active else None)))
    goals = _goals(trainer)
    if not goals:
        return Length(seconds)
    share, done, goal, unit = max(goals)  # the run ends at the first of them
    is_known = is_active and share >= _TOO_EARLY
    return Length(seconds, done, goal, unit, seconds * (1 - share) / share if is_known else None)


def require_way_to_go(trainer: Any, since: Any) -> None:
    """Refuse to train where there is nothing left to do.

    :param trainer: Lightning's, with the end that was set for it
    :param since: the one that has trained until now; it can be the same
    :raises TrainingError: if that end is reached
    """
    for name, done in (("max_epochs", since.current_epoch), ("max_steps", since.global_step)):
        end = getattr(trainer, name)
        if end is not None and 0 < end <= done:
            raise TrainingError(
                f"the run has trained as long as it was to: {name}={end} is reached. For more, make a TrainingRun of "
                f"the same model with a larger {name}; without one, it trains until it is stopped"
            )


def trained_seconds(events: Sequence[Event], now: float | None) -> float:
    """Seconds between each start of a run, or end of a pause, and the pause or the end that followed.

    :param events: of the run's history
    :param now: on their clock, if the run has not ended
    """
    total, since = 0.0, None
    for event in events:
        word = event.text.split(":")[0]
        if event.kind == "run" and word in _BEGINS:
            since = event.time
        elif event.kind == "run" and word in _ENDS and since is not None:
            total, since = total + event.time - since, None
    return total if now is None or since is None else total + max(0.0, now - since)


def _goals(trainer: Any) -> list[tuple[float, int, int, str]]:
    """For each end that was set: the share of it that is done, and of what how much."""
    if trainer is None:
        return []
    found = []
    passes, batches = trainer.current_epoch, trainer.global_step
    if trainer.max_epochs is not None and trainer.max_epochs > 0:
        in_pass, done = trainer.num_training_batches, trainer.fit_loop.epoch_loop.batch_progress.current.completed
        part = done / in_pass if passes < trainer.max_epochs and 0 < in_pass < math.inf else 0.0
        share = min(1.0, (passes + min(part, 1.0)) / trainer.max_epochs)
        found.append((share, passes, trainer.max_epochs, "pass"))
    if trainer.max_steps > 0:
        found.append((min(1.0, batches / trainer.max_steps), batches, trainer.max_steps, "batch"))
    return found
