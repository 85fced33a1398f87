"""The data of a run, in the forms in which people have it."""

from __future__ import annotations

from typing import Any

import lightning

from hivenb.errors import TrainingError


def split_data(data: Any) -> tuple[Any, Any]:
    """Training and validation data as ``Trainer.fit`` takes them, second and third.

    :param data: a DataLoader, a LightningDataModule, or a pair of DataLoaders
    :raises TrainingError: if there is nothing to train on
    """
    train, validation = data if isinstance(data, (tuple, list)) and len(data) == 2 else (data, None)
    if train is None:
        raise TrainingError("data is None; give a DataLoader, a LightningDataModule, or (training, validation)")
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
