"""The data of a run, in the forms in which people have it."""

from __future__ import annotations

import math
from typing import Any

import lightning
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden

from hivenb.errors import TrainingError

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
