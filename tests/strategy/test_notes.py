"""What options cost that work is said when training begins, and when they are changed."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from lightning import Callback
from tiny import DELAYS, TinyModel, loader, own_run, trainer

import hivenb
from hivenb.strategy import HivemindStrategy


class Switching(Callback):
    """Changes an option before a batch.

    :param changes: by the number of the batch
    """

    def __init__(self, changes: dict[int, bool]):
        self._changes = changes

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in self._changes:
            strategy = trainer.strategy
            strategy.change_options(strategy.options.replace(delay_compensation=self._changes[batch_idx]))


@pytest.mark.parametrize(
    ("at_first", "changes", "times"),
    [(False, {}, 1), (True, {}, 0), (True, {2: False}, 1), (False, {2: True, 4: False}, 2)],
    ids=["off", "on", "switched off", "switched on and off"],
)
def test_gradients_that_come_late_are_told_of(
    swarm: hivenb.Swarm, at_first: bool, changes: dict[int, bool], times: int
) -> None:
    strategy = HivemindStrategy(16, dht=swarm.dht, **DELAYS, delay_compensation=at_first, **own_run())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(strategy, max_epochs=1, callbacks=[Switching(changes)]).fit(TinyModel(), loader(64))
    told = [str(one.message) for one in caught if "gradients arrive up to one swarm epoch late" in str(one.message)]
    assert len(told) == times
    assert all("a lower learning rate or a longer warm-up helps" in text for text in told)
