"""How many steps a training comes to, in the sense in which schedulers count them: in swarm epochs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader

from hivenb.strategy.counted_batches import count_samples
from hivenb.strategy.schedule_ends import lengths_of, negative_length
from hivenb.strategy.trains import Trains

#: Passes over the data beyond which swarm epochs are reckoned from this many.
_PASSES_WALKED = 10_000


@dataclass(frozen=True)
class Pass:
    """A pass over the data of one peer.

    :param batches: in it; infinite if nobody knows
    :param in_batch: samples in each batch but the last; of several loaders, in the first one
    :param samples: in the pass
    """

    batches: float
    in_batch: int
    samples: float


class EstimatedSteps:
    """What ``trainer.estimated_stepping_batches`` says while the strategy trains: swarm epochs to be expected.

    With Lightning's other strategies it is the number of the steps of the optimizer, by which schedulers move. Here
    these are the swarm's. It is the number for a peer that is alone, whoever takes part: all peers that have the same
    script, and as much data, then have the same schedule, whenever they join.

    :param training: whose steps they are
    """

    def __init__(self, training: Trains):
        self._training = training
        self._trainer: Any = None
        #: what was said last, if anybody has asked in the present or last ``fit``
        self.told: float | None = None
        self._taken_for: Pass | None = None
        self._said: set[str] = set()

    def stand_in(self, trainer: Any) -> None:
        """Let a Trainer's ``estimated_stepping_batches`` be this, until :meth:`step_back`.

        :param trainer: it, or a weak reference to it, as the module has one
        """
        self.told, self._taken_for, self._said, self._trainer = None, None, set(), trainer
        # The only way: it is a property of Lightning's Trainer that asks no strategy and no callback, and all that it
        # counts with (max_epochs, max_steps, the batches of a pass, accumulate_grad_batches) decides how training goes.
        if not _is_counting(trainer):
            trainer.__class__ = _counting(trainer.__class__)

    def step_back(self) -> None:
        """Let the Trainer be as it was."""
        trainer, self._trainer = self._trainer, None
        if trainer is not None and _is_counting(trainer):
            trainer.__class__ = trainer.__class__.__base__

    def of(self, trainer: Any, steps: float) -> float:
        """The number of swarm epochs that a Trainer comes to, with its peer alone; at least 1.

        :param steps: what Lightning says: after how many of this peer's own steps training ends; -1 where nobody knows
        """
        if steps < 0 or steps == math.inf:
            self._say(
                "trainer.estimated_stepping_batches is infinite: this Trainer has no end that could be counted in "
                f"steps (max_epochs={trainer.max_epochs}, max_steps={trainer.max_steps}), and a schedule made of it "
                "does not move. Give max_epochs or max_steps, or the number of swarm epochs, each of "
                f"target_batch_size={self._training.options.target_batch_size} samples, in place of it"
            )
            self.told = math.inf
            return self.told
        through = self._pass_of(trainer)
        if through is None:
            self._say(
                "trainer.estimated_stepping_batches counts this peer's batches, though schedulers move with the epochs "
                "of the swarm: how many samples a batch holds cannot be told before the first one. Give "
                "HivemindStrategy(batch_size=...), or Options(batch_size=...)"
            )
            return steps
        self._taken_for = through
        self.told = self._epochs(trainer, through, int(steps))
        return self.told

    def check(self, trainer: Any, schedulers: Sequence[Any]) -> None:
        """Say so if a scheduler is made for as many steps as this peer computes batches, which are others.

        To be called when the data of the Trainer is set up.

        :param schedulers: that ``configure_optimizers`` has made
        :raises MisconfigurationException: if one is made for a negative number of steps
        """
        for scheduler in schedulers:
            _require_length(scheduler, trainer)
        through = self._pass_of(trainer) if schedulers else None
        if through is None or through.batches == math.inf:
            return
        ends = [trainer.max_epochs * through.batches] if (trainer.max_epochs or -1) > 0 else []
        ends += [trainer.max_steps] if trainer.max_steps > 0 else []
        if not ends:
            return
        every = trainer.accumulate_grad_batches
        own = {*ends, *(end // every for end in ends), *(math.ceil(end / every) for end in ends)}
        passes = trainer.max_epochs if (trainer.max_epochs or -1) > 0 else math.inf
        steps = min(math.ceil(through.batches / every) * passes, *ends)
        epochs = self._epochs(trainer, through, int(steps))
        for scheduler in schedulers:
            taken = next((length for length in lengths_of(scheduler) if length in own), None)
            if taken is not None and abs(taken - epochs) > 1:
                self._say(
                    f"{type(scheduler).__name__} is made for {taken:g} steps, which are batches of this peer, and "
                    "schedulers move once in each swarm epoch: there are about "
                    f"{epochs} of them until this Trainer ends, if this peer is alone. Make it of "
                    "self.trainer.estimated_stepping_batches, which is that number with HivemindStrategy"
                )

    def see_batch(self, samples: int) -> None:
        """Say so if a batch holds another number of samples than was reckoned with; the first one tells."""
        through, self._taken_for = self._taken_for, None
        if through is None or samples in (0, through.in_batch) or samples >= through.samples:
            return  # it is as it was said, has nothing to count, as with an auxiliary peer, or is a whole pass
        present = None if self._trainer is None else self._pass_of(self._trainer)
        if present is not None and present.in_batch == samples:
            return  # somebody has changed it, such as BatchSizeFinder; a pass has as many samples as before
        self._say(
            f"trainer.estimated_stepping_batches was reckoned with {through.in_batch} samples in each batch, as the "
            f"data says, and the first one holds {samples}. Give HivemindStrategy(batch_size={samples}), or "
            f"Options(batch_size={samples})"
        )

    def _epochs(self, trainer: Any, through: Pass, steps: int) -> int:
        return epochs_in(through, steps, trainer.accumulate_grad_batches, self._training.options.target_batch_size)

    def _pass_of(self, trainer: Any) -> Pass | None:
        if trainer.train_dataloader is None:
            trainer.fit_loop.setup_data()
        combined = trainer.fit_loop._combined_loader
        return pass_over(
            combined.flattened,
            trainer.num_training_batches,
            self._training.options.batch_size,
            is_cycled=combined._mode == "max_size_cycle",
        )

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            rank_zero_warn(text)


def _require_length(scheduler: Any, trainer: Any) -> None:
    length = negative_length(scheduler)
    if length is None:
        return
    if trainer.max_epochs == -1:
        why = "trainer.max_epochs is -1, which stands for no end, and it seems to be made of that"
    else:
        why = "a schedule cannot have that length"
    raise MisconfigurationException(
        f"{type(scheduler).__name__} is made for {length:g} steps: {why}. Its learning rate would be wrong. Give "
        "max_epochs=..., and make it of self.trainer.estimated_stepping_batches, which is the number of swarm epochs "
        "to be expected; or give that number itself"
    )


def epochs_in(through: Pass, steps: int, every: int, target: int) -> int:
    """Epochs of a swarm of one peer, which ends each as soon as it has its samples.

    :param steps: of the Trainer, in all
    :param every: batches of each such step, but the last of a pass
    :param target: samples of an epoch
    :returns: those that are whole; at least 1
    """
    in_step: float = every * through.in_batch
    steps_in_pass = math.ceil(through.batches / every) if through.batches < math.inf else math.inf
    in_last = through.samples - (steps_in_pass - 1) * in_step if steps_in_pass < math.inf else 0
    if in_last < 0:  # of several loaders, some end before the pass does, or have small batches in between
        in_step = in_last = through.samples / steps_in_pass
    walked = min(steps, _PASSES_WALKED * steps_in_pass)
    epochs, carried = 0, 0.0
    for begun in _passes(walked, steps_in_pass):
        is_whole = begun == steps_in_pass
        full = begun - is_whole
        needed = math.ceil((target - carried) / in_step)
        if full >= needed:
            more, left = divmod(full - needed, math.ceil(target / in_step))
            epochs, carried = epochs + 1 + more, left * in_step
        else:
            carried += full * in_step
        if is_whole:
            carried += in_last
            if carried >= target:
                epochs, carried = epochs + 1, 0
    return max(1, int(epochs * steps / walked) if walked else epochs)


def _passes(steps: float, in_pass: float) -> Iterator[int]:
    while steps > 0:
        yield int(min(steps, in_pass))
        steps -= in_pass


def pass_over(
    loaders: Sequence[Any], batches: float, batch_size: int | None, *, is_cycled: bool = False
) -> Pass | None:
    """What a pass over loaders holds, as far as it can be told without going through them.

    :param loaders: those that together give each batch, of which all samples count
    :param batches: that are computed of them
    :param batch_size: samples for which each batch counts, whatever it holds; ``None`` if they are counted
    :param is_cycled: whether a loader begins anew that ends before the pass does; else it gives nothing any more
    :returns: ``None`` if nobody knows how many samples a batch has
    """
    if batch_size is not None:
        return Pass(batches, batch_size, batches * batch_size)
    in_batch = [size for one in loaders if (size := _samples_in_batch(one)) is not None]
    if not loaders or len(in_batch) < len(loaders):
        return None
    of_each = zip(loaders, in_batch, strict=True)
    return Pass(batches, sum(in_batch), sum(_samples_given(one, size, batches, is_cycled) for one, size in of_each))


def _samples_given(loader: Any, in_batch: int, batches: float, is_cycled: bool) -> float:
    whole, length = _samples_in_round(loader, in_batch), _length(loader)
    if whole is None or batches == math.inf:
        return batches * in_batch
    mean: float = in_batch
    if length and _said_size(loader) is None:
        mean = whole / length
    elif length:
        whole = min(whole, length * in_batch)  # a sampler may go through a part of the data
    rounds, rest = divmod(batches, length) if is_cycled and length else (0, batches)
    return rounds * whole + min(rest * mean, whole)


def _batch_sampler(loader: Any) -> Any:
    """What tells a loader which samples make a batch; ``None`` if nothing does."""
    given = getattr(loader, "batch_sampler", None)
    if given is not None:
        return given
    sampler = getattr(loader, "sampler", None)  # a dataset may take the indices of a whole batch at once
    return sampler if _is_size(getattr(sampler, "batch_size", None)) else None


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and value > 0


def _said_size(loader: Any) -> int | None:
    """Samples in a batch, where a loader or what makes its batches says that each has as many."""
    sizes = (getattr(owner, "batch_size", None) for owner in (loader, _batch_sampler(loader)))
    return next((size for size in sizes if _is_size(size)), None)


def _samples_in_batch(loader: Any) -> int | None:
    if (size := _said_size(loader)) is not None:
        return size
    sampler = _batch_sampler(loader)
    if isinstance(loader, DataLoader) and sampler is not None:
        batches, samples = _length(sampler), _length(loader.dataset)
        return None if not batches or samples is None else max(1, round(samples / batches))
    data = loader.dataset if isinstance(loader, DataLoader) else loader  # which gives batches
    if not hasattr(data, "__getitem__") or not _length(data):
        return None
    try:
        return count_samples(data[0])
    except Exception:  # of somebody's dataset, which may be asked for something else; the first batch will tell
        return None


def _samples_in_round(loader: Any, in_batch: int) -> int | None:
    sampler = _batch_sampler(loader)
    if sampler is None:
        return None
    samples = _length(getattr(sampler, "sampler", None) or loader.dataset)
    if samples is None:
        return None
    return samples - samples % in_batch if getattr(sampler, "drop_last", False) else samples


def _length(of: Any) -> int | None:
    try:
        return len(of)
    except (TypeError, NotImplementedError):
        return None


def _is_counting(trainer: Any) -> bool:
    return "estimated_stepping_batches" in vars(trainer.__class__) and hasattr(trainer.__class__, "_hivenb_counts")


def _made_of(trainer_class: Any) -> Any:
    return trainer_class.__new__(trainer_class)


@cache
def _counting(trainer_class: Any) -> Any:
    """The same class of Trainers, whose strategy says how many steps there are to be expected."""

    class Counting(trainer_class):
        _hivenb_counts = True

        @property
        def estimated_stepping_batches(self) -> float:
            return self.strategy.estimated_steps.of(self, super().estimated_stepping_batches)

        def __reduce_ex__(self, protocol: Any) -> Any:
            return _made_of, (trainer_class,), self.__dict__  # a copy is one of those that people know

    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(Counting, name, getattr(trainer_class, name))
    return Counting
