"""Lightning's strategy for one device, in which peers wait for nobody."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException


class OneDeviceStrategy(SingleDeviceStrategy):
    """Trains on the one device that the Trainer was given."""

    @property
    def parallel_devices(self) -> list[torch.device]:
        """Always empty when read, which makes Lightning hand over the devices that the Trainer was given."""
        return []

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) != 1:
            raise MisconfigurationException(
                f"HivemindStrategy trains on one device for each Trainer, and got {len(devices)}: "
                f"{', '.join(map(str, devices))}. Use devices=1, or devices=[k] to choose one, and let the other "
                "devices join the run as peers of their own"
            )
        self._root_device = devices[0]

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: there is no process group; peers come and go, and wait for nobody."""
