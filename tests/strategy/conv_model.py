"""A convolution whose weights may lie in memory channel by channel. Importable by processes that tests start."""

from __future__ import annotations

from typing import Any

import torch
from tiny import PacedModel
from torch import nn


class ConvModel(PacedModel):
    """A model of the same data as :class:`PacedModel`, as quick as that.

    :param channels_last: the layout of its weights, which has to stay what it is
    :param seed: of its start
    """

    def __init__(self, channels_last: bool = False, seed: int = 1, **kwargs: Any):
        super().__init__(**kwargs)
        self.layer: Any = nn.Sequential(
            nn.Unflatten(1, (4, 1, 1)), nn.Conv2d(4, 3, 3, padding=1), nn.Flatten(), nn.Linear(3, 2)
        )
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        self.to(memory_format=self._layout)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        assert self.layer[1].weight.is_contiguous(memory_format=self._layout)
        return super().training_step(batch, batch_idx)
