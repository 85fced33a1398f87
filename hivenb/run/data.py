"""The data of a run, in the forms in which people have it."""

from __future__ import annotations

from typing import Any

import lightning
import torch

from hivenb.errors import TrainingError


def split_data(data: Any) -> tuple[Any, Any]:
    """Training and validation data as ``Trainer.fit`` takes them, second and third.

    :param data: a DataLoader, a LightningDataModule, or a pair of DataLoaders
    :raises TrainingError: if there is nothing to train on, or it is in another form
    """
    if isinstance(data, (tuple, list)) and len(data) != 2:
        raise TrainingError(
            f"data has {len(data)} parts; give a DataLoader, a LightningDataModule, or (training, validation)"
        )
    train, validation = data if isinstance(data, (tuple, list)) else (data, None)
    if train is None:
        raise TrainingError("data is None; give a DataLoader, a LightningDataModule, or (training, validation)")
    for part in (train, validation):
        _require_batches(part)
    try:
        empty = not isinstance(train, lightning.LightningDataModule) and len(train) == 0
    except (TypeError, NotImplementedError):  # an iterable without a length
        empty = False
    if empty:
        raise TrainingError(
            f"the training data has no batches (its length is 0): {train!r}. Is the dataset empty, or smaller than "
            "a batch with drop_last=True?"
        )
    return train, validation


def _require_batches(part: Any) -> None:
    if isinstance(part, torch.utils.data.Dataset) and not isinstance(part, torch.utils.data.IterableDataset):
        raise TrainingError(
            f"{type(part).__name__} gives single samples, and training takes batches; put it into "
            "torch.utils.data.DataLoader(dataset, batch_size=32, shuffle=True)"
        )
