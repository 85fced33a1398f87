"""One start of a run: its Trainer with the strategy, the data, and the monitor beside them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import lightning

from hivenb.errors import TrainingError
from hivenb.run.data import split_data
from hivenb.run.length import require_way_to_go
from hivenb.run.model_copy import model_of
from hivenb.run.monitor import Monitor
from hivenb.run.raised_exits import EndsInError
from hivenb.run.run_in_swarm import RunInSwarm
from hivenb.run.trainer import leave_out_searches, make_trainer
from hivenb.strategy.hivemind_strategy import HivemindStrategy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from hivenb.engine.progress.peer_reports import PeerInfo
    from hivenb.run.kept_modes import KeptModes
    from hivenb.run.recorder import Recorder
    from hivenb.run.stage import Gate
    from hivenb.swarm.roster import Roster


class PreparedRun(RunInSwarm, Protocol):
    """What of a run its Trainer and its monitor are made of."""

    @property
    def roster(self) -> Roster:
        """Who takes part."""


@dataclass(frozen=True)
class Fit:
    """What one call of ``Trainer.fit`` works with; :class:`hivenb.TrainingRun` makes a new one at each start.

    :param recorder: of the run
    :param gate: of this start
    :param modes: of the run's model
    :param train: training data, as ``Trainer.fit`` takes it
    :param validation: validation data, if there is any
    """

    trainer: lightning.Trainer
    strategy: HivemindStrategy
    monitor: Monitor
    recorder: Recorder
    gate: Gate
    modes: KeptModes
    train: Any
    validation: Any

    @property
    def optimizer(self) -> Any:
        """The swarm's optimizer; ``None`` before the Trainer has set it up and after it has ended."""
        return self.strategy.optimizer

    def __call__(self, model: lightning.LightningModule, checkpoint: Path | None) -> None:
        """Train until the Trainer ends.

        :param checkpoint: to go on from, if any
        :raises TrainingError: if the end that was set for it is that of the checkpoint, there was not one batch, or the
          thread that watches the swarm has ended with an error meanwhile
        """
        before = self.recorder.steps
        if checkpoint is not None:
            leave_out_searches(self.trainer)
        self.modes.begin(model_of(model))
        strategy: Any = self.strategy
        strategy._launcher = EndsInError()
        try:
            self.trainer.fit(model, self.train, self.validation, ckpt_path=checkpoint, weights_only=False)
        finally:
            strategy._launcher = None
            self.modes.end()
        if (error := self.monitor.error) is not None:
            raise TrainingError(
                f"the thread that watches the swarm has ended with {error!r}, an error of hivenb's own; please report "
                "it. run.start() goes on from here"
            ) from error
        if self.recorder.steps == before and (self.strategy.data_is_exhausted or not self.trainer.should_stop):
            if not self.gate.has_begun:  # Lightning has left all out
                require_way_to_go(self.trainer, self.trainer)
            raise TrainingError("the training data gave no batches; is the dataset empty?")

    def end(self) -> None:
        """Let training end at its next batch, where the gate is."""
        # not by trainer.should_stop: Lightning would validate first, and keep to min_epochs and min_steps
        if self.optimizer is not None:
            self.optimizer.retire()


def prepare_fit(
    run: PreparedRun,
    folder: str,
    recorder: Recorder,
    gate: Gate,
    modes: KeptModes,
    on_epoch: Callable[[Any], None],
    on_look: Callable[[Sequence[PeerInfo]], None],
) -> Fit:
    """Make all that a run needs to train, and start nothing.

    :param folder: for the Trainer's files
    :param recorder: of the run
    :param gate: of the run; like the recorder, it comes after the callbacks in the run's ``trainer_kwargs``
    :param modes: of the run's model
    :param on_epoch: called on the training thread after each epoch of the swarm
    :param on_look: called by the monitor, once a second, with the peers that are here
    :raises TrainingError: if the data has no batches
    :raises SwarmError: if the swarm is closed, or its DHT was given up and cannot be started anew
    :raises Exception: what Lightning says if it cannot make a Trainer of the keyword arguments
    """
    train, validation = split_data(run.data, run.model)
    run.swarm.revive()
    with run.swarm.logs.this_thread():
        strategy = HivemindStrategy(dht=run.swarm.dht, **run.options.to_strategy_kwargs())
        trainer = make_trainer(strategy, folder, run.trainer_kwargs, [recorder, gate])
    strategy.on_epoch, strategy.on_notice = on_epoch, partial(run.history.mark, "run")
    strategy.on_trial = partial(gate.look_up_in_trial, trainer)
    monitor = Monitor(
        run.swarm,
        run.options.run_id,
        run.history,
        run.roster,
        lambda: run.options.target_batch_size,
        lambda: recorder.samples,
    )
    monitor.on_look = on_look
    monitor.tracker = lambda: strategy.optimizer and strategy.optimizer.tracker
    monitor.left_out = lambda: strategy.optimizer.rounds.reasons if strategy.optimizer else {}
    fit = Fit(trainer, strategy, monitor, recorder, gate, modes, train, validation)
    monitor.on_error = lambda: gate.stop(fit.end)
    return fit
