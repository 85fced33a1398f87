"""How many samples a batch holds."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException


def count_samples(batch: Any) -> int:
    """Samples in a batch of whatever type, as Lightning finds them.

    :raises MisconfigurationException: if it cannot be told; the message says what to do
    """
    try:
        return extract_batch_size(batch)
    except (MisconfigurationException, RecursionError) as e:
        raise MisconfigurationException(
            f"cannot tell the number of samples in a batch of type {type(batch).__name__}; give it as "
            "HivemindStrategy(batch_size=...)"
        ) from e
