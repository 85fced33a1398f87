"""Cuts tensors alike in a group of hivenb's peers, whatever codec each of them has chosen.

hivemind cuts each tensor into parts of 512 KiB *after* compression (``averaging/partition.py``,
``TensorPartContainer``), so where it cuts depends on the codec. Peers with different codecs then expect different
parts of each other, and every round with a tensor of more than 131,072 numbers fails.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.group_info import GroupInfo
from hivemind.compression import CompressionBase, CompressionInfo, TensorRole
from hivemind.optim.grad_averager import GradientAverager

from hivenb.engine.rounds.gathered import UPSTREAM_FIELDS, are_of_ours


class PartsCutAlike(DecentralizedAverager):
    """Mixin to put *before* a class of hivemind's averagers.

    A group of hivenb's peers alone cuts its tensors as if they were not compressed; one with a peer of plain hivemind
    in it, as that one does: they need the same codec then.
    """

    async def _aggregate_with_group(self, group_info: GroupInfo, min_vector_size: int, **kwargs: Any) -> Any:
        if are_of_ours(group_info.gathered):
            # hivemind names no role for gradients, so RoleAdaptiveCompression would take them for anything else
            role = TensorRole.GRADIENT if isinstance(self, GradientAverager) else TensorRole.UNSPECIFIED
            kwargs["compression"] = _CutUncompressed(kwargs["compression"], role)
        records = map(self.serializer.loads, group_info.gathered)
        known = tuple(self.serializer.dumps(record[:UPSTREAM_FIELDS]) for record in records)
        group_info = dataclasses.replace(group_info, gathered=known)
        return await super()._aggregate_with_group(group_info, min_vector_size, **kwargs)


class _CutUncompressed(CompressionBase):
    """Another codec, all but the estimate by which tensors are cut.

    :param role: of the tensors that have none
    """

    def __init__(self, codec: CompressionBase, role: TensorRole):
        self._codec, self._role = codec, role

    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> Any:
        if info.role is TensorRole.UNSPECIFIED:
            info = dataclasses.replace(info, role=self._role)
        return self._codec.compress(tensor, info, allow_inplace=allow_inplace)

    def extract(self, serialized_tensor: Any) -> torch.Tensor:
        return self._codec.extract(serialized_tensor)

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        return 1.0
