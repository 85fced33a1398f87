"""Tensors that a round exchanges without loss whatever the codec, some of them for the largest instead of the mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hivemind.compression import CompressionBase, CompressionInfo, NoCompression
from hivemind.compression.adaptive import AdaptiveCompressionBase

from hivenb.engine.trust.aggregation import NO_WEIGHT

_UNCOMPRESSED = NoCompression()


@dataclass(frozen=True)
class ExactKey:
    """Instead of the key that hivemind gives to a tensor: it is not to be compressed.

    :param takes_largest: whether a round makes of it the largest value of the group, and not the mean
    """

    takes_largest: bool = False


class SendsExactly(AdaptiveCompressionBase):
    """Another codec, of which tensors with an :class:`ExactKey` know nothing.

    Half precision ends at 65,504, and eight bits share one range: a variance may be beyond the one, and a count is not
    to be rounded.

    :param codec: for all others
    """

    def __init__(self, codec: CompressionBase):
        self.codec = codec

    def choose_compression(self, info: CompressionInfo) -> CompressionBase:
        return _UNCOMPRESSED if isinstance(info.key, ExactKey) else self.codec

    def extract(self, serialized_tensor: Any) -> torch.Tensor:
        return self.codec.extract(serialized_tensor)


class LargestOfAll:
    """In place of the sum in which hivemind's reducer gathers a part from all senders: the largest of each number."""

    def __init__(self) -> None:
        self._largest: torch.Tensor | None = None
        self._has_weight = False

    def add_(self, part: torch.Tensor, alpha: float) -> None:
        """Take a sender's part in.

        :param part: numbers that are finite
        :param alpha: its weight; one without any, such as a peer that only helps, counts where nobody has one
        """
        has_weight = alpha > NO_WEIGHT
        if self._largest is None or (has_weight and not self._has_weight):
            self._largest = part.clone()
        elif has_weight or not self._has_weight:
            self._largest = torch.maximum(self._largest, part)
        self._has_weight |= has_weight

    def div_(self, total_weight: float) -> torch.Tensor | None:
        """What has come of it; the sum would be divided here."""
        return self._largest
