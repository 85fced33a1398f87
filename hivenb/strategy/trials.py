"""Trials of Lightning's tuners, which look for a batch size or a learning rate: no business of the swarm's.

A tuner writes a checkpoint, lets the Trainer's loop train a few batches, as often as it likes, and loads that file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hivenb.engine.optimizer.skipped_batches import scaler_of_one_peer
from hivenb.strategy.callbacks import FirstCallback
from hivenb.strategy.module_hooks import ModuleHooks
from hivenb.strategy.trains import Trains

#: What Lightning's Trainer calls the barrier before it runs a loop itself.
_STAGE = "run-stage"


class Trials:
    """Whether training that a Trainer begins is a trial. For the thread that trains.

    :param training: between whose batches it is
    :param hooks: of the module, while it trains
    :param set_up: as :func:`hivenb.strategy.reused_model.set_up_as` gave it; it is written to
    """

    def __init__(self, training: Trains, hooks: ModuleHooks | None = None, set_up: Mapping[str, Any] | None = None):
        self._training, self._hooks, self._set_up = training, hooks, set_up or {}
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
        """Training begins, or a trial.

        :returns: whether it is a trial: another one than the Trainer runs its loop, without the Trainer's callbacks.
          Either alone may be something else, and a training that is taken for a trial would teach nobody anything
        """
        is_stage, self._is_run_by_trainer = self._is_run_by_trainer, False
        if is_stage or any(isinstance(one, FirstCallback) for one in trainer.callbacks):
            self.end()  # unless whoever has tried something out has put things back
            self.note_found()
            return False
        plugin = trainer.precision_plugin
        if not self.are_on and getattr(plugin, "scaler", None) is not None:
            self._scaler, plugin.scaler = plugin.scaler, scaler_of_one_peer(plugin.scaler)
        self.are_on = True
        if (optimizer := self._training.optimizer) is not None and self._hooks is not None:
            optimizer.begin_trial()
            self._hooks.enable_zero_grad()
        return True

    def end(self) -> None:
        """What trials have changed was put back, if there were any: the optimizer has the rates from before."""
        optimizer = self._training.optimizer
        if not self.are_on or optimizer is None or self._hooks is None:
            return
        self.put_scaler_back()
        self.are_on = False
        self._rates = [float(group["lr"]) for group in optimizer.opt.param_groups if "lr" in group]
        optimizer.end_trial()
        if self._training.options.reuse_grad_buffers:
            self._hooks.disable_zero_grad()
        optimizer.skipped_batches.note(True)

    def note_found(self) -> None:
        """Training goes on after trials: a rate that one of them has found is how the optimizer was set up.

        Else another start would take it for one that somebody has changed meanwhile.
        """
        rates, self._rates = self._rates, []
        if not rates or (optimizer := self._training.optimizer) is None:
            return
        for known, before, group in zip(
            self._set_up.get("groups", ()), rates, optimizer.opt.param_groups, strict=False
        ):
            if group["lr"] != before:
                known["lr"] = float(group["lr"])

    def put_scaler_back(self) -> None:
        """Let the swarm's scaler be in its place again."""
        if self._scaler is not None:
            self._training.precision_plugin.scaler, self._scaler = self._scaler, None
