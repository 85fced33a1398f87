"""Makes the strategy known to Lightning's Trainers: to both of its packages, and by its name."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from lightning.pytorch.utilities.exceptions import MisconfigurationException

#: Lightning comes as two packages with the same content, whose classes do not know each other.
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")

#: Samples in each global step with ``Trainer(strategy="hivemind")``, as in Lightning's documentation.
REGISTERED_TARGET_BATCH_SIZE = 8192

#: What LightningCLI makes of the class when nothing else is given for it: a name, in small letters.
_NAMES_OF_THE_CLASS = (
    "hivemindstrategy",
    "hivenb.hivemindstrategy",
    "hivenb.strategy.hivemindstrategy",
    "hivenb.strategy.hivemind_strategy.hivemindstrategy",
)


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
        registry = module.StrategyRegistry
        if strategy.strategy_name not in registry.available_strategies():
            for name in _NAMES_OF_THE_CLASS:
                registry.register(name, _say_what_is_missing, description="HivemindStrategy needs a target_batch_size")
            registry.register(
                strategy.strategy_name,
                strategy,
                description=f"Collaborative training with target_batch_size={REGISTERED_TARGET_BATCH_SIZE}",
                target_batch_size=REGISTERED_TARGET_BATCH_SIZE,
            )


def _say_what_is_missing() -> NoReturn:
    raise MisconfigurationException(
        "HivemindStrategy needs a target_batch_size: the samples that all peers gather together before each step. Give "
        "HivemindStrategy(target_batch_size=...), or on the command line also --trainer.strategy.target_batch_size=..."
    )
