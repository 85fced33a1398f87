"""What a strategy is that trains one module, which nobody else trains, on one device, without a process group."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from hivenb.options.options import Options
from hivenb.strategy.modules_in_training import hold, let_go


class OneDeviceStrategy(SingleDeviceStrategy):
    """Base of :class:`hivenb.HivemindStrategy`: a device of its own, and a module of its own while it trains."""

    options: Options
    _module: Any = None

    @property
    def _lightning_module(self) -> Any:
        return self._module

    @_lightning_module.setter
    def _lightning_module(self, module: Any) -> None:
        # the first that a Trainer does with a module: what is refused here has changed nothing yet
        if module is not None:
            hold(module, self)
        self._module = module

    def teardown(self) -> None:
        """Move the module to host memory, and let others have it."""
        try:
            super().teardown()
        finally:
            let_go(self)

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
