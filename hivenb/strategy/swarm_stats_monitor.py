"""A callback that logs what the swarm does to whatever loggers the Trainer has."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from hivenb.engine.optimizer.scheduled_rounds import EpochReport
from hivenb.strategy.strategy import HivemindStrategy


class SwarmStatsMonitor(Callback):
    """Logs each swarm epoch to the Trainer's loggers, as ``LearningRateMonitor`` logs the rate.

    The metrics, at the Trainer's ``global_step``:

    - ``hivemind_epoch``: global steps that the swarm has made
    - ``hivemind_peers``: peers in the run, this one included
    - ``hivemind_group_size``: peers that averaged gradients in this swarm epoch; 1 when it was alone or the round
      failed
    - ``hivemind_samples``: samples that this peer has put in
    - ``hivemind_stalled_seconds``: seconds of the swarm epoch for which its training stood still
    - ``hivemind_skipped_batches``: batches of this peer so far that count for nothing, as their gradients were not
      finite

    With a Trainer whose strategy is another one it does nothing.
    """

    def __init__(self) -> None:
        self._logged: EpochReport | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._logged = None

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, HivemindStrategy):
            return
        report = strategy.last_epoch_report
        if report is None or report is self._logged:
            return
        self._logged = report
        metrics = {
            "hivemind_epoch": report.epoch,
            "hivemind_peers": strategy.num_peers,
            "hivemind_group_size": report.group_size,
            "hivemind_samples": report.samples,
            "hivemind_stalled_seconds": report.seconds,
            "hivemind_skipped_batches": 0 if strategy.optimizer is None else strategy.optimizer.skipped_batches.total,
        }
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)
