"""What options cost and gain: the same training with each of them in turn, as figures side by side."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hivenb.errors import OptionsError, TrainingError
from hivenb.figures.history import Series, Snapshot
from hivenb.options.options import Options
from hivenb.run.training import TrainingRun
from hivenb.swarm.swarm import Swarm

if TYPE_CHECKING:
    import pandas as pd

#: Epochs that the peers are given to find each other before those that are compared begin.
EPOCHS_TO_MEET = 30

#: Share of the points of the loss, the newest, whose mean is the final loss where nothing is validated.
_LAST = 0.1


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a training with some options came to at this peer.

    :param name: of these options in the comparison
    :param options: what it trained with
    :param seconds_per_epoch: mean time of an epoch of the swarm, from the first one of all peers on
    :param stalled_share: share of that time for which training stood still, from 0 to 1
    :param bytes_per_epoch: bytes sent to other peers in an epoch, on average; ``None`` where it cannot be measured
    :param peak_memory: the most bytes of main memory that this process has used
    :param final_loss: the last validation loss; without validation, the mean training loss of the last tenth
    :param snapshot: of the whole history
    """

    name: str
    options: Options
    seconds_per_epoch: float
    stalled_share: float
    bytes_per_epoch: float | None
    peak_memory: float
    final_loss: float
    snapshot: Snapshot


@dataclass(frozen=True, eq=False)
class Comparison:
    """Outcomes of the same training with different options. Can be pickled as far as the options can.

    :param outcomes: in the order in which they came about
    """

    outcomes: tuple[Outcome, ...]

    def __getitem__(self, name: str) -> Outcome:
        """The outcome of the options of that name."""
        return {outcome.name: outcome for outcome in self.outcomes}[name]

    def to_dataframe(self) -> pd.DataFrame:
        """A row for each outcome, with its figures.

        :raises MissingDependencyError: without pandas
        """
        from hivenb.figures.history import require_pandas

        columns = ("seconds_per_epoch", "stalled_share", "bytes_per_epoch", "peak_memory", "final_loss")
        return require_pandas().DataFrame(
            [{name: getattr(outcome, name) for name in columns} for outcome in self.outcomes],
            index=[outcome.name for outcome in self.outcomes],
        )

    def __repr__(self) -> str:
        return f"Comparison({', '.join(outcome.name for outcome in self.outcomes)})"


def run_each(
    options: Mapping[str, Options],
    model: Any,
    data: Any,
    *,
    epochs: int,
    local_peers: int = 2,
    seed: int = 0,
    **trainer_kwargs: Any,
) -> Comparison:
    """Train with each of several options in turn, from the same start, with as many peers, each in a swarm of its own.

    See :func:`hivenb.compare`, which shows the outcome.

    :param options: by the name under which to compare them
    :param model: the LightningModule to begin with; it stays as it is
    :param data: as for :class:`hivenb.TrainingRun`
    :param epochs: of the swarm, for each, after all peers have met; at least 2
    :param local_peers: further peers, as processes on this machine
    :param seed: of all random numbers
    :param trainer_kwargs: keyword arguments of ``lightning.Trainer``
    :raises OptionsError: if there is nothing to compare
    :raises TrainingError: if a training ends before its epochs are over
    :raises Exception: what ended a training
    """
    if not options or not all(isinstance(one, Options) for one in options.values()):
        raise OptionsError(f"options={options!r}: give a dict of hivenb.Options by name")
    if epochs < 2:
        raise OptionsError(f"epochs={epochs!r}: give at least 2; the first one is not counted")
    training = _Training(model, data, epochs, local_peers, seed, trainer_kwargs)
    return Comparison(tuple(training.outcome(name, one) for name, one in options.items()))


@dataclass(frozen=True, eq=False)
class _Training:
    """What is the same for all options of a comparison; see :func:`run_each`."""

    model: Any
    data: Any
    epochs: int
    local_peers: int
    seed: int
    trainer_kwargs: Mapping[str, Any]

    def outcome(self, name: str, options: Options) -> Outcome:
        """Train with these options."""
        import lightning

        lightning.seed_everything(self.seed, verbose=False)
        with Swarm(f"comparison: {name}") as swarm:
            model = copy.deepcopy(self.model)
            run = TrainingRun(model, self.data, swarm=swarm, options=options, **self.trainer_kwargs)
            if self.local_peers:
                swarm.add_local_peers(self.local_peers, run)
            run.start()
            _meet(run, 1 + self.local_peers)
            if not run.wait(epochs=self.epochs):
                reached = f"training ended in epoch {run.status.epoch}"
                raise TrainingError(f"{name}: {reached}, before its {self.epochs} were over")
            run.stop()
        return outcome_of(name, options, run.history.snapshot(), 1 + self.local_peers)


def _meet(run: TrainingRun, peers: int) -> None:
    """Wait until all peers have been in a round; with local updates there is none to be seen."""
    for _ in range(0 if run.options.use_local_updates else EPOCHS_TO_MEET):
        if run.history.snapshot().last("group_size") == peers or not run.wait(epochs=1):
            return


def outcome_of(name: str, options: Options, snapshot: Snapshot, peers: int) -> Outcome:
    """The figures of a training, from its history.

    :param peers: that took part; what was before their first epoch together does not count
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
        peak_memory=_most(snapshot.series.get("memory")),
        final_loss=_final_loss(snapshot),
        snapshot=snapshot,
    )


def _growth(totals: Series | None, since: float, epochs: int) -> float | None:
    if totals is None or not len(totals) or not epochs:
        return None
    return float(totals.values[-1] - np.interp(since, totals.times, totals.values)) / epochs


def _most(series: Series | None) -> float:
    return float(series.highs.max()) if series is not None and len(series) else float("nan")


def _final_loss(snapshot: Snapshot) -> float:
    validated = snapshot.last("val_loss")
    if validated is not None:
        return validated
    losses = snapshot.series["loss"].values if "loss" in snapshot.series else np.array([np.nan])
    return float(losses[-max(1, int(_LAST * len(losses))) :].mean())
