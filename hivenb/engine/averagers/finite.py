"""Whether gradients are finite, for the price of one pass over them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch


@torch.no_grad()
def are_finite(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Whether no tensor holds nan or inf. Reads each once, and waits once for each device.

    :param tensors: of any shapes, types and devices; of sparse ones, the values that they hold count
    """
    by_device: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor is not None:
            by_device[tensor.device].append(tensor.coalesce().values() if tensor.is_sparse else tensor)
    return all(_are_finite(alike) for alike in by_device.values())


def _are_finite(tensors: list[torch.Tensor]) -> bool:
    # one kernel for many tensors on a GPU; a nan or inf anywhere is one in the sum
    norms = torch._foreach_norm(tensors)
    if math.isfinite(torch.stack([norm.float() for norm in norms]).sum().item()):
        return True
    return all(bool(tensor.isfinite().all()) for tensor in tensors)  # the squares of large numbers are not either


def where_not_finite(tensors: Iterable[torch.Tensor | None]) -> str:
    """In words: ``nan or inf in 2 of 8 gradients, the first of shape (64, 10)``."""
    given = [tensor for tensor in tensors if tensor is not None]
    bad = [tensor for tensor in given if not are_finite([tensor])]
    first = f", the first of shape {tuple(bad[0].shape)}" if bad else ""
    return f"nan or inf in {len(bad)} of {len(given)} gradients{first}"
