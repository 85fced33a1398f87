"""Makes the strategy known to Lightning's Trainers: to both of its packages, and by its name."""

from __future__ import annotations

import sys
from typing import Any

#: Lightning comes as two packages with the same content, whose classes do not know each other.
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")

#: Samples in each global step with ``Trainer(strategy="hivemind")``, as in Lightning's documentation.
REGISTERED_TARGET_BATCH_SIZE = 8192


def make_known(strategy: Any) -> None:
    """Let the Trainer of each of Lightning's packages that is imported by now take a strategy; again has no effect.

    :param strategy: a class with a ``strategy_name``; ``Trainer(strategy=strategy_name)`` makes one that is set to
      :data:`REGISTERED_TARGET_BATCH_SIZE`
    """
    for package in _PACKAGES:
        module: Any = sys.modules.get(f"{package}.strategies")
        if module is None:
            continue
        module.Strategy.register(strategy)
        if strategy.strategy_name not in module.StrategyRegistry.available_strategies():
            module.StrategyRegistry.register(
                strategy.strategy_name,
                strategy,
                description=f"Collaborative training with target_batch_size={REGISTERED_TARGET_BATCH_SIZE}",
                target_batch_size=REGISTERED_TARGET_BATCH_SIZE,
            )
