"""The first thing that a late peer computes with the swarm's parameters is its first batch, not its second."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning import Callback
from tiny import LOOPBACK, TinyModel, loader, own_run, parameters, trainer

import hivenb
from hivenb.engine.network.dht import DHT
from hivenb.engine.optimizer.optimizer import Optimizer
from hivenb.engine.progress import tracker
from hivenb.strategy import HivemindStrategy
from hivenb.swarm.invite import read_invite

#: A target that nobody reaches while the late peer trains.
FAR = 10_000


class Diary(TinyModel):
    """One that begins with zeros, and writes down with which parameters each batch is computed."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.data.zero_()
        self.pages: list[tuple[str, list[torch.Tensor]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.pages.append((str(self.trainer.state.stage.value), parameters(self)))
        return super().training_step(batch, batch_idx)


class Stop(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = batch_idx == 2


@pytest.fixture
def late_dht(swarm: hivenb.Swarm) -> Iterator[DHT]:
    invite = read_invite(swarm.invite)
    opened = DHT(start=True, initial_peers=list(invite.addresses), secret=invite.key, **LOOPBACK)
    yield opened
    opened.shutdown()


@pytest.mark.parametrize("checks", [0, 1], ids=["no check before training", "a check before training"])
def test_a_late_peer_computes_nothing_with_its_own_beginning(
    swarm: hivenb.Swarm, late_dht: DHT, checks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker, "SILENCE", 1000.0)  # the first one stays on the list, however slow the machine is
    run = own_run()
    there = TinyModel()
    first = Optimizer(
        dht=swarm.dht,
        optimizer=torch.optim.SGD(there.parameters(), lr=0.1),
        target_batch_size=FAR,
        matchmaking_time=0.5,
        delay_state_averaging=False,
        **run,
    )
    try:
        first.load_state_dict({**first.state_dict(), "hivemind": {"local_epoch": 3}})
        first.begin()
        late = Diary()
        strategy = HivemindStrategy(FAR, dht=late_dht, matchmaking_time=0.5, **run)
        fitting = trainer(strategy, max_epochs=1, num_sanity_val_steps=checks, callbacks=[Stop()])
        fitting.fit(late, loader(), loader(8))
    finally:
        first.shutdown()
    stages = [stage for stage, _ in late.pages]
    assert stages[: checks + 3] == ["sanity_check"] * checks + ["train"] * 3
    for _, page in late.pages:
        for theirs, ours in zip(parameters(there), page, strict=True):
            assert torch.equal(theirs, ours)
