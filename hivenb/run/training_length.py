"""How long a run has trained, and how far it is on the way to the end that was set for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hivenb.errors import TrainingError

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Timer

#: Before this share of the whole is done, what is left cannot be told from it.
_TOO_EARLY = 0.02


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


@dataclass(frozen=True)
class Beginning:
    """From where the pace of a run is reckoned: it may begin with a checkpoint, which is a part of the way.

    :param seconds: that it had trained
    :param share: of the way to its end that was done
    """

    seconds: float = 0.0
    share: float = 0.0

    @classmethod
    def at(cls, trainer: Any, seconds: float) -> Beginning:
        """Where a Trainer is now.

        :param trainer: Lightning's, which has begun to train
        :param seconds: that its run has trained
        """
        goals = _goals(trainer, begins=True)
        return cls(seconds, max(goals)[0] if goals else 0.0)


def length_of(trainer: Any, seconds: float, since: Beginning, is_active: bool) -> Length:
    """The length of a run. Cheap: asks neither the data nor the device.

    :param trainer: Lightning's; ``None`` before the first start
    :param seconds: that the run has trained
    :param since: from where its pace is reckoned
    :param is_active: whether it trains, or is about to
    """
    whole = float(math.floor(seconds))
    goals = _goals(trainer)
    if not goals:
        return Length(whole)
    share, done, goal, unit = max(goals)  # the run ends at the first of them
    gained = share - since.share
    is_known = is_active and gained >= _TOO_EARLY * (1 - since.share) and gained > 0
    return Length(whole, done, goal, unit, (seconds - since.seconds) * (1 - share) / gained if is_known else None)


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
    if (most := _seconds_that_are_up(trainer, since)) is not None:
        raise TrainingError(
            f"the run has trained as long as it was to: max_time, {most:,g} seconds, is up. For more, make a "
            "TrainingRun of the same model, for which it begins anew; without max_time, it trains until it is stopped"
        )


def _seconds_that_are_up(trainer: Any, since: Any) -> float | None:
    """For how long it was to train, if that time is up and it is to do nothing else at least."""
    from lightning.pytorch.callbacks import Timer  # here: a length is shown without Lightning and what it imports

    least = trainer.fit_loop.min_epochs or 0, trainer.fit_loop.epoch_loop.min_steps or 0
    if since.current_epoch < least[0] or since.global_step < least[1]:
        return None
    timers, before = ([one for one in of.callbacks if isinstance(one, Timer)] for of in (trainer, since))
    if len(timers) != len(before):  # another end was set meanwhile
        return None
    both = [(timer._duration, old) for timer, old in zip(timers, before, strict=True)]
    return next(
        (most for most, old in both if most is not None and _is_at_rest(old) and old.time_elapsed() >= most), None
    )


def let_timers_go_on(trainer: Any) -> None:
    """Let the Timers of a Trainer that has begun measure again, of which each may have ended with a Trainer before."""
    from lightning.pytorch.callbacks import Timer
    from lightning.pytorch.trainer.states import RunningStage

    for one in trainer.callbacks:
        if isinstance(one, Timer):
            one._end_time[RunningStage.TRAINING] = None  # the seconds until then are in the checkpoint


def _is_at_rest(timer: Timer) -> bool:
    """Whether it has ended, or not begun: one whose training has failed goes on."""
    return timer.start_time() is None or timer.end_time() is not None


def _goals(trainer: Any, begins: bool = False) -> list[tuple[float, int, int, str]]:
    """For each end that was set: the share of it that is done, and of what how much.

    :param begins: whether training is about to begin, where a pass that is over counts as a pass and as its batches
    """
    if trainer is None:
        return []
    found = []
    passes, batches = trainer.current_epoch, trainer.global_step
    if trainer.max_epochs is not None and trainer.max_epochs > 0:
        in_pass, done = trainer.num_training_batches, trainer.fit_loop.epoch_loop.batch_progress.current.completed
        part = done / in_pass if passes < trainer.max_epochs and 0 < in_pass < math.inf else 0.0
        part = 0.0 if begins and part >= 1 else part
        share = min(1.0, (passes + min(part, 1.0)) / trainer.max_epochs)
        found.append((share, passes, trainer.max_epochs, "pass"))
    if trainer.max_steps > 0:
        found.append((min(1.0, batches / trainer.max_steps), batches, trainer.max_steps, "batch"))
    return found
