"""What options cost and gain: the same training with each of them in turn, as figures side by side."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from hivenb.errors import OptionsError, TrainingError
from hivenb.figures.history import Series, Snapshot
from hivenb.figures.metric_names import validation_loss_among
from hivenb.options.options import Options
from hivenb.run.fit import parts_of
from hivenb.run.monitor import MemoryUse, let_go_of_tensors
from hivenb.run.status import RunState
from hivenb.run.training import TrainingRun
from hivenb.swarm.swarm import Swarm

if TYPE_CHECKING:
    import pandas as pd

#: Epochs that the peers are given to find each other before those that are compared begin.
EPOCHS_TO_MEET = 30

#: Seconds between two looks at a training.
LOOK_INTERVAL = 0.5

#: Seconds between two looks at its epoch.
_PAUSE = 0.1

#: Share of the points of the training loss, the newest, whose mean is the loss at the end.
_LAST = 0.1


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a training with some options came to at this peer.

    :param name: of these options in the comparison
    :param options: what it trained with
    :param seconds_per_epoch: mean time of a swarm epoch, from the first one of all peers on
    :param stalled_share: share of that time for which training stood still, from 0 to 1
    :param bytes_per_epoch: bytes sent to other peers in an epoch, on average; ``None`` where it cannot be measured
    :param peak_memory: the most bytes of main memory that this training took in this process and in those that it
      started, peers on this machine left out; what was taken before it began does not count
    :param peak_gpu_memory: the most bytes that its tensors took on GPUs; ``None`` without one
    :param training_loss: mean over the last tenth of the points of the history
    :param validation_loss: the last one; ``None`` without validation
    :param snapshot: of the whole history
    """

    name: str
    options: Options
    seconds_per_epoch: float
    stalled_share: float
    bytes_per_epoch: float | None
    peak_memory: float
    peak_gpu_memory: float | None
    training_loss: float
    validation_loss: float | None
    snapshot: Snapshot


@dataclass(frozen=True, eq=False)
class Unfinished:
    """Options with which no training has come to its end, or not yet.

    :param name: of these options in the comparison
    :param options: what it trains with, or was to train with
    :param words: what it does at the moment, or how it ended
    :param snapshot: of its history; ``None`` if it never began
    :param error: what ended it, if it was an error
    """

    name: str
    options: Options
    words: str = "waits for its turn"
    snapshot: Snapshot | None = None
    error: Exception | None = None


@dataclass(frozen=True, eq=False)
class Comparison:
    """The same training with different options. Can be pickled as far as the options can.

    :param entries: what became of each, in the order in which the options were given
    """

    entries: tuple[Outcome | Unfinished, ...]

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """Of the trainings that came to their end."""
        return tuple(one for one in self.entries if isinstance(one, Outcome))

    @property
    def unfinished(self) -> tuple[Unfinished, ...]:
        """The others: interrupted, failed, not begun, or still at work."""
        return tuple(one for one in self.entries if isinstance(one, Unfinished))

    def __getitem__(self, name: Any) -> Outcome:
        """The outcome of the options of that name, or of what reads like it, such as a number.

        :raises KeyError: if there is none; it says why
        """
        entry = next((one for one in self.entries if one.name == str(name)), None)
        if isinstance(entry, Outcome):
            return entry
        known = ", ".join(repr(one.name) for one in self.outcomes) or "none"
        raise KeyError(f"{name!r}: {'unknown' if entry is None else entry.words}; finished: {known}")

    def to_dataframe(self) -> pd.DataFrame:
        """A row for each outcome, with its figures.

        :raises MissingDependencyError: without pandas
        """
        from hivenb.figures.history import require_pandas

        columns = (
            "seconds_per_epoch", "stalled_share", "bytes_per_epoch", "peak_memory", "peak_gpu_memory", "training_loss",
            "validation_loss",
        )  # fmt: skip
        return require_pandas().DataFrame(
            [{name: getattr(outcome, name) for name in columns} for outcome in self.outcomes],
            index=[outcome.name for outcome in self.outcomes],
            columns=list(columns),
        )

    def __repr__(self) -> str:
        names = [outcome.name for outcome in self.outcomes]
        return f"Comparison({', '.join([*names, *(f'{one.name}: {one.words}' for one in self.unfinished)])})"


Watch = Callable[[Comparison], None]


@dataclass(frozen=True, eq=False)
class ComparedTraining:
    """What is the same for all options of a comparison.

    :param model: the LightningModule to begin with; it stays as it is
    :param data: as for :class:`hivenb.TrainingRun`; generators of random numbers that its loaders have stay as they are
    :param epochs: swarm epochs for each, after all peers have met; at least 2
    :param local_peers: further peers, as processes on this machine
    :param seed: of all random numbers
    :param trainer_kwargs: keyword arguments of ``lightning.Trainer``; callbacks stay as they are
    :param swarm_settings: keyword arguments of :class:`hivenb.Swarm`
    """

    model: Any
    data: Any
    epochs: int
    local_peers: int
    seed: int
    trainer_kwargs: Mapping[str, Any]
    swarm_settings: Mapping[str, Any] = field(default_factory=dict)

    def outcome(self, name: str, options: Options, tell: Callable[[Unfinished], None]) -> Outcome:
        """Train with these options.

        :param name: of these options
        :param tell: called about twice a second with how far it has come
        :raises TrainingError: if the training ends before its epochs are over, or its callbacks cannot be copied
        :raises Exception: what ended it
        """
        with _generators_kept(self.data):
            return self._outcome(name, options, tell)

    def _outcome(self, name: str, options: Options, tell: Callable[[Unfinished], None]) -> Outcome:
        import lightning

        lightning.seed_everything(self.seed, verbose=False)
        memory, peers = MemoryUse(), 1 + self.local_peers
        state = Unfinished(name, options, "opens a swarm")
        tell(state)
        model, trainer_kwargs = self._copies()
        with Swarm(f"comparison: {name}", **self.swarm_settings) as swarm:
            run = TrainingRun(model, self.data, swarm=swarm, options=options, keep_history=False, **trainer_kwargs)

            def look(words: str) -> None:
                memory.look()
                tell(replace(state, words=words, snapshot=run.history.snapshot()))

            if self.local_peers:
                look(f"starts {self.local_peers} local peer{'s' * (self.local_peers > 1)}")
                swarm.add_local_peers(self.local_peers, run)
            look("starts to train")
            run.start()
            if not _meet(run, peers, lambda: look("peers meet")):
                _require_all(run, name)
                raise TrainingError(
                    f"{name}: the {peers} peers have not met within {EPOCHS_TO_MEET} epochs, and fewer are no "
                    "comparison. Longer epochs help (target_batch_size), or fewer local_peers"
                )
            first = run.status.epoch
            if not _follow(run, self.epochs, lambda: look(f"epoch {run.status.epoch - first} of {self.epochs}")):
                reached = f"training ended in epoch {run.status.epoch}"
                raise TrainingError(f"{name}: {reached}, before its {self.epochs} were over")
            _require_all(run, name)
            look("stops")
            run.stop()
        return outcome_of(name, options, run.history.snapshot(), peers, memory)

    def _copies(self) -> tuple[Any, dict[str, Any]]:
        """The model and the keyword arguments of the Trainer for one training, which change nothing of these."""
        memo: dict[int, Any] = {}  # a callback may hold the model: its copy holds that of the model
        model, trainer_kwargs = copy.deepcopy(self.model, memo), dict(self.trainer_kwargs)
        try:  # they count, as EarlyStopping does
            callbacks = copy.deepcopy(trainer_kwargs.get("callbacks"), memo)
        except Exception as e:
            raise TrainingError(
                f"callbacks={trainer_kwargs['callbacks']!r} cannot be copied for each of the trainings "
                f"({type(e).__name__}: {e}); keep open files, locks and generators out of them"
            ) from e
        return model, trainer_kwargs | ({} if callbacks is None else {"callbacks": callbacks})


@contextmanager
def _generators_kept(data: Any) -> Iterator[None]:
    """Put the generators of random numbers of some data's loaders back to where they were."""
    kept = [(generator, generator.get_state()) for generator in _generators(data)]
    try:
        yield
    finally:
        for generator, state in kept:
            generator.set_state(state)


def _generators(data: Any) -> list[torch.Generator]:
    loaders = [part for part in parts_of(data) if isinstance(part, DataLoader)]
    samplers = [sampler for loader in loaders for sampler in (loader.sampler, loader.batch_sampler)]
    holders = [*loaders, *samplers, *(getattr(sampler, "sampler", None) for sampler in samplers)]
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def run_each(training: ComparedTraining, options: Mapping[Any, Options], watch: Watch) -> Comparison:
    """Train with each of several options in turn, from the same start, with as many peers, each in a swarm of its own.

    An interrupt (KeyboardInterrupt) stops the training at work and begins no other; a training that fails does not
    keep the others from their turn. What is finished is returned. See :func:`hivenb.compare`, which shows it.

    :param training: what is the same for all
    :param options: by the name under which to compare them, which becomes a text
    :param watch: called about twice a second, on this thread, with what there is so far
    :raises OptionsError: if there is nothing to compare, or two names read the same
    :raises Exception: the first error, if every training has failed
    """
    is_named = isinstance(options, Mapping) and all(isinstance(one, Options) for one in options.values())
    if not options or not is_named:
        example = '{"plain": options, "half": options.replace(grad_compression="float16")}'
        raise OptionsError(f"options={options!r}: give a dict of hivenb.Options by name, such as {example}")
    if training.epochs < 2:
        raise OptionsError(f"epochs={training.epochs!r}: give at least 2; the first one is not counted")
    names = [str(name) for name in options]  # such as 1 and 32, which stand in a table
    if len(set(names)) < len(names):
        raise OptionsError(f"options have names that read the same: {', '.join(names)}; give each one of its own")
    options = dict(zip(names, options.values(), strict=True))
    entries: dict[str, Outcome | Unfinished] = {name: Unfinished(name, one) for name, one in options.items()}

    def put(entry: Outcome | Unfinished) -> None:
        entries[entry.name] = entry
        watch(Comparison(tuple(entries.values())))

    for name, one in options.items():
        try:
            put(training.outcome(name, one, put))
        except KeyboardInterrupt:
            _mark_interrupted(entries, name)
            break
        except Exception as error:
            let_go_of_tensors(error)  # the others need the memory
            put(replace(_unfinished(entries[name]), words=f"failed: {type(error).__name__}: {error}", error=error))
    comparison = Comparison(tuple(entries.values()))
    errors = [entry.error for entry in comparison.unfinished if entry.error is not None]
    if len(errors) == len(entries):
        raise errors[0]
    return comparison


def _mark_interrupted(entries: dict[str, Outcome | Unfinished], name: str) -> None:
    for entry in [one for one in entries.values() if isinstance(one, Unfinished) and one.error is None]:
        words = f"interrupted ({entry.words})" if entry.name == name else "not begun: interrupted before"
        entries[entry.name] = replace(entry, words=words)


def _unfinished(entry: Outcome | Unfinished) -> Unfinished:
    return entry if isinstance(entry, Unfinished) else Unfinished(entry.name, entry.options, snapshot=entry.snapshot)


def _meet(run: TrainingRun, peers: int, look: Callable[[], None]) -> bool:
    """Wait until all peers have been in a round; with local updates there is none to be seen.

    :returns: whether they have, or training has ended
    """
    if run.options.use_local_updates:
        return True
    for _ in range(EPOCHS_TO_MEET):
        if run.history.snapshot().last("group_size") == peers or not _follow(run, 1, look):
            return True
    return False


def _require_all(run: TrainingRun, name: str) -> None:
    """Refuse figures of fewer peers than there were to be.

    :raises TrainingError: with the last words of a local peer that has ended
    """
    for peer in run.local_peers:
        if peer.state == "failed":
            raise TrainingError(f"{name}: local peer {peer.number} has ended: {peer.last_words}")


def _follow(run: TrainingRun, epochs: int, look: Callable[[], None]) -> bool:
    """Wait until the run has gone so many epochs further, and look meanwhile; without the words of ``run.wait``."""
    goal, due = run.status.epoch + epochs, time.monotonic()
    while run.status.epoch < goal:
        if time.monotonic() >= due:
            look()
            due = time.monotonic() + LOOK_INTERVAL
        run.wait_for(RunState.FINISHED, timeout=_PAUSE)
        if not run.status.state.is_active:
            return run.status.epoch >= goal
    return True


def outcome_of(name: str, options: Options, snapshot: Snapshot, peers: int, memory: MemoryUse) -> Outcome:
    """The figures of a training, from its history.

    :param peers: that took part; what was before their first epoch together does not count
    :param memory: what it took
    """
    stalled, sizes = snapshot.series["stalled_seconds"], snapshot.series["group_size"]
    first = int(np.argmax(sizes.highs >= peers))  # 0 if they never met
    seconds = float(stalled.times[-1] - stalled.times[first])
    epochs = int(stalled.epochs[-1] - stalled.epochs[first])
    sums = stalled.values * stalled.counts
    return Outcome(
        name=name,
        options=options,
        seconds_per_epoch=seconds / max(epochs, 1),
        stalled_share=float(sums[first + 1 :].sum()) / seconds if seconds else 0.0,
        bytes_per_epoch=_growth(snapshot.series.get("bytes_sent"), float(stalled.times[first]), epochs),
        peak_memory=memory.peak,
        peak_gpu_memory=memory.gpu_peak,
        training_loss=_mean_of_last(snapshot.series.get("loss")),
        validation_loss=snapshot.last(validation_loss_among(snapshot.series) or ""),
        snapshot=snapshot,
    )


def _growth(totals: Series | None, since: float, epochs: int) -> float | None:
    if totals is None or not len(totals) or not epochs:
        return None
    return float(totals.values[-1] - np.interp(since, totals.times, totals.values)) / epochs


def _mean_of_last(series: Series | None) -> float:
    if series is None or not len(series):
        return float("nan")
    return float(series.values[-max(1, int(_LAST * len(series))) :].mean())
