"""Running statistics of normalization layers, which no batch may spoil that is left out."""

from __future__ import annotations

import torch
from torch import nn


class RunningStatistics:
    """The running statistics of a module, such as BatchNorm's, as they were after the last step.

    One batch with nan makes them nan for good, and with them each validation: the forward pass adds it to them before
    its gradients are known.

    :param module: on its device
    """

    def __init__(self, module: nn.Module):
        self._layers = [layer for layer in module.modules() if getattr(layer, "running_mean", None) is not None]
        self._kept = [buffer.clone() for buffer in self._buffers()]

    @property
    def are_there(self) -> bool:
        """Whether the module has any."""
        return bool(self._kept)

    def _buffers(self) -> list[torch.Tensor]:
        return [buffer for layer in self._layers for buffer in layer.buffers(recurse=False)]

    @torch.no_grad()
    def follow(self, counts: bool) -> None:
        """Keep what there is, or put back what was kept last.

        :param counts: whether what there is counts; if not, it is of a batch that is left out
        """
        for kept, now in zip(self._kept, self._buffers(), strict=True):
            if counts:
                kept.copy_(now)
            else:
                now.copy_(kept)
