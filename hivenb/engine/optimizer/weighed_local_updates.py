"""Epochs of the swarm in which each peer has trained by itself, and counts for as much as it has trained."""

from __future__ import annotations

from typing import Any

import hivemind
from hivemind.optim.grad_scaler import GradScaler

from hivenb.engine.rounds.robust_aggregation import NEXT_TO_NOTHING


class WeighsLocalUpdates(hivemind.Optimizer):
    """Base to put *before* ``hivemind.Optimizer``: what peers average for an outer optimizer is weighed by samples.

    Without one, each peer's parameters count the same, as in ``hivemind``.
    """

    rounds: Any
    state_averager: Any

    def _update_global_epoch(self, grad_scaler: GradScaler | None) -> None:
        averager = self.state_averager
        if averager.outer is None:
            super()._update_global_epoch(grad_scaler)
            return
        averager.fragments.count(self.local_progress.samples_accumulated)
        if self.scheduled_state is not None:
            samples = averager.samples_of_round(self.scheduled_state.epoch)
            self.scheduled_state.weight = max(NEXT_TO_NOTHING, samples)
        was_alone = self.rounds.is_alone
        super()._update_global_epoch(grad_scaler)
        if was_alone and self.rounds.is_alone and self.local_epoch % self.average_state_every == 0:
            averager.step_alone()
