"""One start of a run: its Trainer with the strategy, the data, and the monitor beside them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import lightning
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, LearningRateFinder
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden

from hivenb._signatures import keywords_of
from hivenb.errors import OptionsError, SwarmError, TrainingError
from hivenb.options.options import DEFAULT_RUN_ID, Options
from hivenb.run.concurrent_runs import RunInSwarm
from hivenb.run.model_copy import model_of
from hivenb.run.monitor import Monitor
from hivenb.run.raised_exits import EndsInError
from hivenb.run.training_length import require_way_to_go
from hivenb.strategy.strategy import HivemindStrategy
from hivenb.swarm.start import ANOTHER_RUN
from hivenb.swarm.swarm import Swarm

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hivenb.engine.progress.peer_reports import PeerInfo
    from hivenb.run.module_modes import KeptModes
    from hivenb.run.pause_and_stop import Gate
    from hivenb.run.recorder import Recorder
    from hivenb.swarm.members import MemberList


# -- arguments -------------------------------------------------------------------------------------------------------
#
# What a run is made of, looked at before anything begins: beginners mix these things up.


_OF_A_MODULE = ("training_step", "configure_optimizers")


def check_arguments(model: Any, swarm: Any, options: Any, trainer_kwargs: Mapping[str, Any]) -> None:
    """Refuse what cannot become a run.

    :param trainer_kwargs: keyword arguments of ``lightning.Trainer``
    :raises TrainingError: if there is a strategy among them, or the model or the swarm is something else
    :raises OptionsError: if the options are something else than :class:`hivenb.Options`
    """
    if "strategy" in trainer_kwargs:
        raise TrainingError(
            f"strategy={trainer_kwargs['strategy']!r} cannot be given to a TrainingRun: it trains with "
            "HivemindStrategy, set up by options=. Use lightning.Trainer directly for another one"
        )
    if isinstance(model, type):
        raise TrainingError(f"model is the class {model.__name__}; give one of its instances: {model.__name__}(...)")
    if not isinstance(model, torch.nn.Module) or not all(hasattr(model, name) for name in _OF_A_MODULE):
        raise TrainingError(
            f"model has to be a LightningModule, with training_step and configure_optimizers, and is a "
            f"{type(model).__name__}"
        )
    if not isinstance(swarm, Swarm):
        raise TrainingError(f"swarm={swarm!r} is no swarm; {_how_to_open(swarm)}")
    if not isinstance(options, Options):
        raise OptionsError(
            f"options has to be a hivenb.Options, and is {options!r}; write hivenb.Options(target_batch_size=...)"
        )


def in_invited_run(options: Options, swarm: Swarm) -> Options:
    """The same options, in the run that the invite has named, unless they name another one."""
    if swarm.invited_to is None or options.run_id != DEFAULT_RUN_ID:
        return options
    return options.replace(run_id=swarm.invited_to)


def _how_to_open(swarm: Any) -> str:
    if isinstance(swarm, str):
        return "join the one that an invite leads to with swarm=hivenb.Swarm.join(...)"
    return "open one with swarm=hivenb.Swarm()"


# -- data ------------------------------------------------------------------------------------------------------------
#
# The data of a run, in the forms in which people have it.


#: What a run takes.
FORMS = (
    "give a DataLoader, a list or dict of several, a CombinedLoader, a LightningDataModule, or a tuple: "
    "(training, validation)"
)

#: Modes of a CombinedLoader in which one part without batches leaves none to train on.
_NEED_ALL = ("min_size", "max_size_cycle")


def split_data(data: Any, model: Any = None) -> tuple[Any, Any]:
    """Training and validation data as ``Trainer.fit`` takes them, second and third.

    A tuple is a pair of training and validation data. All else is training data as a Trainer takes it: a list of two
    loaders is two loaders to train on together.

    :param data: training data, or a pair
    :param model: which may bring its training data itself, as ``train_dataloader``
    :raises TrainingError: if there is nothing to train on, or it is in another form
    """
    if isinstance(data, tuple) and len(data) != 2:
        raise TrainingError(
            f"data is a tuple of {len(data)} parts; {FORMS}. Several loaders to train on together are a list"
        )
    train, validation = data if isinstance(data, tuple) else (data, None)
    if train is None:
        if isinstance(model, lightning.LightningModule) and is_overridden("train_dataloader", model):
            return None, validation
        raise TrainingError(f"data is None; {FORMS}")
    _require_training_data(train)
    for part in parts_of(validation):
        _require_batches(part)
    return train, validation


def parts_of(data: Any) -> list[Any]:
    """The loaders in some data, whatever holds them; a LightningDataModule stays as it is."""
    if data is None or not isinstance(data, (CombinedLoader, list, tuple, dict)):
        return [] if data is None else [data]
    combined = data if isinstance(data, CombinedLoader) else CombinedLoader(data, "max_size_cycle")
    return list(combined.flattened)


def _require_training_data(train: Any) -> None:
    mode = getattr(train, "_mode", None) if isinstance(train, CombinedLoader) else "max_size_cycle"
    if mode == "sequential":
        raise TrainingError(
            'the training data is a CombinedLoader(mode="sequential"), which a Trainer only validates and tests with; '
            'for training there are the modes "min_size", "max_size_cycle" and "max_size"'
        )
    parts = parts_of(train)
    for part in parts:
        _require_batches(part)
    empty = [part for part in parts if _length(part) == 0]
    if not parts or len(empty) == len(parts) or (empty and mode in _NEED_ALL):
        shown = repr(empty[0]) if empty else repr(train)
        raise TrainingError(
            f"the training data has no batches (its length is 0): {shown}. Is the dataset empty, or smaller than "
            "a batch with drop_last=True?"
        )


def _length(part: Any) -> float:
    """Batches of a part, infinity where nobody knows."""
    length = None if isinstance(part, lightning.LightningDataModule) else sized_len(part)
    return math.inf if length is None else length


def _require_batches(part: Any) -> None:
    if isinstance(part, torch.utils.data.Dataset) and not isinstance(part, torch.utils.data.IterableDataset):
        raise TrainingError(
            f"{type(part).__name__} gives single samples, and training takes batches; put it into "
            "torch.utils.data.DataLoader(dataset, batch_size=32, shuffle=True)"
        )


# -- trainer ---------------------------------------------------------------------------------------------------------
#
# The Trainer of a run: what it is created with unless told otherwise.


#: What the Trainer of a run is created with unless told otherwise: no printing from a background thread, no files.
TRAINER_DEFAULTS: dict[str, Any] = {
    "accelerator": "auto",
    "devices": 1,
    "max_epochs": -1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "logger": False,
    "num_sanity_val_steps": 0,
}


def trainer_keywords() -> list[inspect.Parameter]:
    """Keyword arguments of ``lightning.Trainer`` that a run takes, with its own defaults."""
    return keywords_of(lightning.Trainer.__init__, but=("strategy",), defaults=TRAINER_DEFAULTS)


def make_trainer(
    strategy: Any,
    folder: str,
    given: Mapping[str, Any],
    callbacks: Sequence[Callback],
    new_trainer: Callable[..., lightning.Trainer] = lightning.Trainer,
) -> Any:
    """A Trainer with what was given, over :data:`TRAINER_DEFAULTS`.

    :param folder: for its files, unless it was told to write checkpoints or logs: those go where Lightning puts them
    :param given: keyword arguments of ``lightning.Trainer``
    :param callbacks: that come after the given ones
    :param new_trainer: makes one of keyword arguments
    :raises Exception: what Lightning says if it cannot make one of them
    """
    # what a person wants to have written outlives the run
    root = {} if given.get("enable_checkpointing") or given.get("logger") else {"default_root_dir": folder}
    kwargs = {**TRAINER_DEFAULTS, **root, **given}
    own = kwargs.pop("callbacks", None) or []
    own = list(own) if isinstance(own, (list, tuple)) else [own]
    return new_trainer(strategy=strategy, callbacks=[*own, *callbacks], **kwargs)


def leave_out_searches(trainer: Any) -> None:
    """Take from the callbacks of a Trainer those that look for a batch size or a learning rate when it begins.

    For one that goes on from a checkpoint: what was found is in the model by now, and such a search ends with a
    checkpoint of its own, in place of which Lightning restores nothing of the other one but its weights.
    """
    trainer.callbacks[:] = [one for one in trainer.callbacks if not _searches_first(one)]


def _searches_first(callback: Callback) -> bool:
    hooks = {BatchSizeFinder.on_fit_start, LearningRateFinder.on_fit_start}
    return isinstance(callback, (BatchSizeFinder, LearningRateFinder)) and type(callback).on_fit_start in hooks


# -- fit -------------------------------------------------------------------------------------------------------------


class PreparedRun(RunInSwarm, Protocol):
    """What of a run its Trainer and its monitor are made of."""

    @property
    def member_list(self) -> MemberList:
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

    def __call__(
        self, model: lightning.LightningModule, checkpoint: Path | None, is_stopping: Callable[[], bool]
    ) -> None:
        """Train until the Trainer ends.

        :param checkpoint: to go on from, if any
        :param is_stopping: whether somebody has stopped the run
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
        if self.recorder.steps != before:
            return
        if not self.gate.has_begun and not (self.trainer.should_stop and is_stopping()):  # Lightning has left all out
            require_way_to_go(self.trainer, self.trainer)
        if self.strategy.data_is_exhausted or not self.trainer.should_stop:
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
    new_trainer: Callable[..., lightning.Trainer],
) -> Fit:
    """Make all that a run needs to train, and start nothing.

    :param folder: for the Trainer's files
    :param recorder: of the run
    :param gate: of the run; like the recorder, it comes after the callbacks in the run's ``trainer_kwargs``
    :param modes: of the run's model
    :param on_epoch: called on the training thread after each swarm epoch
    :param on_look: called by the monitor, once a second, with the peers that are here
    :param new_trainer: makes a Trainer of keyword arguments
    :raises TrainingError: if the data has no batches
    :raises SwarmError: if the swarm is closed, or its DHT was given up and cannot be started anew
    :raises Exception: what Lightning says if it cannot make a Trainer of the keyword arguments
    """
    train, validation = split_data(run.data, run.model)
    run.swarm.restart_if_ended()
    if not run.swarm.is_open:
        raise SwarmError(
            f"this run belongs to a swarm {run.swarm.name!r} that is closed, and cannot be started any more. Open one "
            f"with swarm = hivenb.Swarm({run.swarm.name!r}), and {ANOTHER_RUN}"
        )
    with run.swarm.logs.this_thread():
        strategy = HivemindStrategy(dht=run.swarm.dht, **run.options.to_strategy_kwargs())
        trainer = make_trainer(strategy, folder, run.trainer_kwargs, [recorder, gate], new_trainer)
    strategy.on_epoch, strategy.on_notice = on_epoch, partial(run.history.mark, "run")
    strategy.on_trial = partial(gate.look_up_in_trial, trainer)
    monitor = Monitor(
        run.swarm,
        run.options.run_id,
        run.history,
        run.member_list,
        lambda: run.options.target_batch_size,
        lambda: recorder.samples,
        lambda: recorder.epoch,
    )
    monitor.on_look = on_look
    monitor.tracker = lambda: strategy.optimizer and strategy.optimizer.tracker
    monitor.excluded_peers = lambda: strategy.optimizer.rounds.reasons if strategy.optimizer else {}
    fit = Fit(trainer, strategy, monitor, recorder, gate, modes, train, validation)
    monitor.on_error = lambda: gate.stop(fit.end)
    return fit
