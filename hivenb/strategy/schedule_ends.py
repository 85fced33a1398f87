"""For how many of its steps a learning rate scheduler was made."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    LambdaLR,
    LRScheduler,
    MultiplicativeLR,
    OneCycleLR,
    SequentialLR,
)

#: Under this name, the functions that transformers makes schedules of know when training ends.
_OF_TRANSFORMERS = "num_training_steps"

#: Places beyond the end of a schedule at which it is looked at.
_LOOKED_AT_BEYOND = 64

#: What schedulers count themselves with.
_COUNTERS = frozenset({"last_epoch", "_step_count", "base_lrs", "_last_lr", "T_cur"})


def end_of(scheduler: Any, estimated: float | None) -> int | None:
    """The step after which a scheduler is not to move: it ends there, and would fail or begin anew.

    :param estimated: steps that the training was said to have, if anybody has asked; a scheduler may be made for a
      whole multiple of them, as for so many peers
    :returns: ``None`` for one that may go on for ever, such as one with a period of its own
    """
    return _end_of(scheduler, estimated, 0)


def _end_of(scheduler: Any, estimated: float | None, begins: int) -> int | None:
    """The same, counted from the step at which another scheduler hands over to it."""
    if isinstance(scheduler, OneCycleLR):
        return int(scheduler.total_steps) - 1  # where it has its lowest rate; its next step is past that
    if isinstance(scheduler, SequentialLR):
        milestone = int(scheduler._milestones[-1])
        last = _end_of(scheduler._schedulers[-1], estimated, begins + milestone)
        return None if last is None else milestone + last
    if isinstance(scheduler, ChainedScheduler):
        ends = [end for one in scheduler._schedulers if (end := _end_of(one, estimated, begins)) is not None]
        return min(ends, default=None)
    lengths = [(name, length) for name, length in _named_lengths(scheduler) if 0 < length < math.inf]
    longest = max((length for _, length in lengths), default=0)
    for name, length in lengths:
        if length != int(length):
            continue
        is_said = name == _OF_TRANSFORMERS or begins + length == estimated
        # a smaller number may be that of a warm-up
        is_multiple = length == longest and _is_multiple(begins + length, estimated)
        if is_said or (is_multiple and _goes_wrong_after(scheduler, int(length))):
            return int(length)
    return None


def _is_multiple(length: float, estimated: float | None) -> bool:
    # of one step, everything is
    return estimated is not None and 1 < estimated < math.inf and length % estimated == 0


def _goes_wrong_after(scheduler: Any, length: int) -> bool:
    """Whether a rate rises again after so many steps, or becomes negative; not where it is the peak of a warm-up."""
    if not isinstance(scheduler, LambdaLR):
        # of total_iters, those of torch keep their last rate; what a class of somebody does is not known
        is_torch = type(scheduler).__module__.startswith("torch.")
        return isinstance(scheduler, CosineAnnealingLR) or not is_torch
    beyond = range(length + 1, 2 * length + 1, max(1, length // _LOOKED_AT_BEYOND))  # a floor may last a while
    try:
        return any(one(step) < 0 or one(step) > one(length) for one in scheduler.lr_lambdas for step in beyond)
    except Exception:  # of somebody's function, which knows no step beyond its end
        return True


def lengths_of(scheduler: Any) -> list[float]:
    """All numbers in a scheduler that may be the number of the steps for which it was made."""
    if isinstance(scheduler, SequentialLR):
        begins = scheduler._milestones[-1]
        return [begins + length for length in lengths_of(scheduler._schedulers[-1])]
    if isinstance(scheduler, ChainedScheduler):
        return [length for one in scheduler._schedulers for length in lengths_of(one)]
    if isinstance(scheduler, OneCycleLR):
        return [scheduler.total_steps]
    return [length for _, length in _named_lengths(scheduler)]


def negative_length(scheduler: Any) -> float | None:
    """The negative number of steps for which a scheduler is made by mistake; ``None`` if there is none.

    Of numbers that a function of somebody knows it is not looked for: one of them may be an exponent.
    """
    for one in getattr(scheduler, "_schedulers", ()):  # of several in a row, or at once
        if (length := negative_length(one)) is not None:
            return length
    names = ("T_max", "total_iters", _OF_TRANSFORMERS)
    known = (length for name, length in _named_lengths(scheduler) if name in names)
    return next((length for length in known if length < 0), None)


def _named_lengths(scheduler: Any) -> Iterator[tuple[str, float]]:
    if isinstance(scheduler, CosineAnnealingLR):
        yield from _numbers({"T_max": scheduler.T_max})
    elif isinstance(scheduler, (LambdaLR, MultiplicativeLR)):
        for function in scheduler.lr_lambdas:
            yield from _numbers(_known_to(function))
    elif hasattr(scheduler, "total_iters"):
        yield from _numbers({"total_iters": scheduler.total_iters})
    elif not (isinstance(scheduler, LRScheduler) and type(scheduler).__module__.startswith("torch.")):
        yield from _numbers({k: v for k, v in vars(scheduler).items() if k not in _COUNTERS})


def _known_to(function: Any) -> dict[str, Any]:
    """What a function was given before it is called."""
    known: dict[str, Any] = {}
    while isinstance(function, partial):
        known |= {str(number): value for number, value in enumerate(function.args)} | function.keywords
        function = function.func
    code = getattr(function, "__code__", None)
    if code is None:
        return known | (vars(function) if hasattr(function, "__dict__") else {})
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # nothing was assigned to it yet
            known[name] = cell.cell_contents
    defaults = function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    return dict(zip(names[len(names) - len(defaults) :], defaults, strict=True)) | known


def _numbers(known: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in known.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, value
