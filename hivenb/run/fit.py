"""One start of a run: its Trainer with the strategy, the data, and the monitor beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning

from hivenb.run.data import split_data
from hivenb.run.monitor import Monitor
from hivenb.run.trainer import make_trainer
from hivenb.strategy.hivemind_strategy import HivemindStrategy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from lightning.pytorch.callbacks import Callback

    from hivenb.engine.progress.peer_reports import PeerInfo
    from hivenb.run.training import TrainingRun


@dataclass(frozen=True)
class Fit:
    """What one call of ``Trainer.fit`` works with; :class:`TrainingRun` makes a new one at each start.

    :param train: training data, as ``Trainer.fit`` takes it
    :param validation: validation data, if there is any
    """

    trainer: lightning.Trainer
    strategy: HivemindStrategy
    monitor: Monitor
    train: Any
    validation: Any

    @property
    def optimizer(self) -> Any:
        """The swarm's optimizer; ``None`` before the Trainer has set it up and after it has ended."""
        return self.strategy.optimizer

    def __call__(self, model: lightning.LightningModule, checkpoint: Path | None) -> None:
        """Train until the Trainer ends.

        :param checkpoint: to go on from, if any
        """
        self.trainer.fit(model, self.train, self.validation, ckpt_path=checkpoint, weights_only=False)


def prepare_fit(
    run: TrainingRun,
    folder: str,
    callbacks: Sequence[Callback],
    on_epoch: Callable[[Any], None],
    on_look: Callable[[Sequence[PeerInfo]], None],
) -> Fit:
    """Make all that a run needs to train, and start nothing.

    :param folder: for the Trainer's files
    :param callbacks: that come after those of the run's ``trainer_kwargs``
    :param on_epoch: called on the training thread after each epoch of the swarm
    :param on_look: called by the monitor, once a second, with the peers that are here
    :raises TrainingError: if the data has no batches
    :raises SwarmError: if the swarm is closed
    :raises Exception: what Lightning says if it cannot make a Trainer of the keyword arguments
    """
    train, validation = split_data(run.data)
    with run.swarm.logs.this_thread():
        strategy = HivemindStrategy(dht=run.swarm.dht, **run.options.to_strategy_kwargs())
        trainer = make_trainer(strategy, folder, run.trainer_kwargs, callbacks)
    strategy.on_epoch = on_epoch
    monitor = Monitor(run.swarm, run.options.run_id, run.history, run.roster, lambda: run.options.target_batch_size)
    monitor.on_look = on_look
    monitor.tracker = lambda: strategy.optimizer and strategy.optimizer.tracker
    return Fit(trainer, strategy, monitor, train, validation)
