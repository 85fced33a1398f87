"""Trials of Lightning's tuners, which look for a batch size or a learning rate: no business of the swarm's.

A tuner writes a checkpoint, lets the Trainer's loop train a few batches, as often as it likes, and loads that file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hivenb.engine.optimizer.skipped_batches import scaler_of_one_peer
from hivenb.strategy.callbacks import LendsModule

#: What Lightning's Trainer calls the barrier before it runs a loop itself.
_STAGE = "run-stage"


class Trials:
    """Whether training that a Trainer begins is a trial. For the thread that trains."""

    def __init__(self) -> None:
        #: whether a trial has begun, and what it has changed was not put back yet
        self.are_on = False
        self._is_run_by_trainer = False
        self._scaler: Any = None
        self._rates: list[float] = []

    def see_barrier(self, name: str | None) -> None:
        """Note that the Trainer has come to a barrier."""
        if name == _STAGE:
            self._is_run_by_trainer = True

    def begin(self, trainer: Any) -> bool:
        """Training begins.

        :returns: whether it is a trial: another one than the Trainer runs its loop, without the Trainer's callbacks.
          Either alone may be something else, and a training that is taken for a trial would teach nobody anything
        """
        is_stage, self._is_run_by_trainer = self._is_run_by_trainer, False
        if is_stage or any(isinstance(one, LendsModule) for one in trainer.callbacks):
            return False
        plugin = trainer.precision_plugin
        if not self.are_on and getattr(plugin, "scaler", None) is not None:
            self._scaler, plugin.scaler = plugin.scaler, scaler_of_one_peer(plugin.scaler)
        self.are_on = True
        return True

    def end(self, plugin: Any, optimizer: torch.optim.Optimizer) -> None:
        """What trials have changed was put back.

        :param plugin: the Trainer's, for its precision
        :param optimizer: with the rates from before
        """
        self.put_scaler_back(plugin)
        self.are_on = False
        self._rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]

    def note_found(self, optimizer: torch.optim.Optimizer, set_up: Mapping[str, Any]) -> None:
        """Training goes on after trials: a rate that one of them has found is how the optimizer was set up.

        Else another start would take it for one that somebody has changed meanwhile.

        :param set_up: as :func:`hivenb.strategy.left_model.set_up_as` gave it; it is written to
        """
        rates, self._rates = self._rates, []
        for known, before, group in zip(set_up.get("groups", ()), rates, optimizer.param_groups, strict=False):
            if group["lr"] != before:
                known["lr"] = float(group["lr"])

    def put_scaler_back(self, plugin: Any) -> None:
        """Let the swarm's scaler be in its place again."""
        if self._scaler is not None:
            plugin.scaler, self._scaler = self._scaler, None
