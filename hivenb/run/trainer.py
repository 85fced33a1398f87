"""The Trainer of a run: what it is created with unless told otherwise."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import lightning
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, LearningRateFinder

from hivenb._signatures import keywords_of

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


def make_trainer(strategy: Any, folder: str, given: Mapping[str, Any], callbacks: Sequence[Callback]) -> Any:
    """A Trainer with what was given, over :data:`TRAINER_DEFAULTS`.

    :param folder: for its files, unless it was told to write checkpoints or logs: those go where Lightning puts them
    :param given: keyword arguments of ``lightning.Trainer``
    :param callbacks: that come after the given ones
    :raises Exception: what Lightning says if it cannot make one of them
    """
    # what a person wants to have written outlives the run
    root = {} if given.get("enable_checkpointing") or given.get("logger") else {"default_root_dir": folder}
    kwargs = {**TRAINER_DEFAULTS, **root, **given}
    own = kwargs.pop("callbacks", None) or []
    own = list(own) if isinstance(own, (list, tuple)) else [own]
    return lightning.Trainer(strategy=strategy, callbacks=[*own, *callbacks], **kwargs)


def leave_out_searches(trainer: Any) -> None:
    """Take from the callbacks of a Trainer those that look for a batch size or a learning rate when it begins.

    For one that goes on from a checkpoint: what was found is in the model by now, and such a search ends with a
    checkpoint of its own, in place of which Lightning restores nothing of the other one but its weights.
    """
    trainer.callbacks[:] = [one for one in trainer.callbacks if not _searches_first(one)]


def _searches_first(callback: Callback) -> bool:
    hooks = {BatchSizeFinder.on_fit_start, LearningRateFinder.on_fit_start}
    return isinstance(callback, (BatchSizeFinder, LearningRateFinder)) and type(callback).on_fit_start in hooks
