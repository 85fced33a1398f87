"""Whose state a peer goes on with when a return is due: its own copy, or that of the others."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from lightning import Callback
from tiny import TinyModel, loader, own_run, trainer

import hivenb
from hivenb.strategy import HivemindStrategy
from hivenb.strategy.reused_model import LeftModel
from hivenb.strategy.rollback import Rollback
from hivenb.swarm.agreement.options_record import Return

TO, AT = 10, 14


class Returning(Rollback):
    """One of a training of which there is what a return needs; it notes what it does."""

    def __init__(self, local_epoch: int, has_copy: bool):
        self.done: list[str] = []
        self.optimizer: Any = SimpleNamespace(
            local_epoch=local_epoch,
            tracker=SimpleNamespace(global_epoch=AT),
            rounds=SimpleNamespace(begin_anew=lambda: None),
            share_state=lambda shares: None,
            fall_behind=lambda: self.done.append("downloads"),
        )
        training: Any = SimpleNamespace(
            options=SimpleNamespace(auto_roll_back=False, auxiliary=False), optimizer=self.optimizer
        )
        super().__init__(training)
        self.kept.epoch = TO if has_copy else None

    def roll_back(self, epoch: int | None = None) -> int:
        self.done.append(f"returns at {epoch}")
        return TO


@pytest.mark.parametrize(
    ("local_epoch", "has_copy", "done"),
    [
        (AT - 1, True, [f"returns at {AT}"]),
        (AT - 1, False, []),  # it sees the others ahead
        (AT, True, [f"returns at {AT}"]),
        (AT, False, ["downloads"]),
        (AT + 1, True, []),
        (AT + 1, False, []),
    ],
    ids=str,
)
def test_who_learns_of_it_before_in_or_after_its_epoch(local_epoch: int, has_copy: bool, done: list[str]) -> None:
    own = Returning(local_epoch, has_copy)
    own.expect_return(Return(TO, AT))
    own.return_if_due()
    assert own.done == done


@pytest.mark.parametrize(
    ("downloaded", "done"),
    [
        (AT, [f"returns at {AT}"]),  # maybe from somebody that has not returned yet
        (AT + 1, []),
    ],
)
def test_who_has_downloaded_a_state_since_then(downloaded: int, done: list[str]) -> None:
    own = Returning(AT - 1, True)
    own.expect_return(Return(TO, AT))
    own.optimizer.local_epoch = downloaded
    own.return_if_due()
    assert own.done == done


@pytest.mark.parametrize("goes_on", [False, True])
def test_another_fit_has_what_was_kept_only_if_it_goes_on_with_the_model(swarm: hivenb.Swarm, goes_on: bool) -> None:
    class Looks(Callback):
        def on_train_start(self, *args: Any) -> None:
            kept.append(chosen.rollback.kept.epoch)
            calm.append(chosen.rollback.loss_watch.is_calm)

    kept: list[int | None] = []
    calm: list[bool] = []
    chosen = HivemindStrategy(8, dht=swarm.dht, matchmaking_time=0.5, snapshot_every=2, **own_run())
    fitting = trainer(chosen, max_epochs=1, callbacks=[Looks()])
    fitting.fit(TinyModel(), loader())
    assert (chosen.rollback.kept.epoch or 0) > 0
    before = chosen.rollback.kept.epoch
    chosen.rollback.loss_watch.note([math.nan])
    chosen.left = LeftModel() if goes_on else None
    fitting.fit_loop.max_epochs = 2
    fitting.fit(TinyModel(), loader())
    assert kept == [None, before if goes_on else None]
    assert calm == [True, not goes_on]
