"""Peers that nobody can connect to, and gradients of a low rank: all peers agree after each epoch."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager
from tiny import LOOPBACK, loader, parameters, trainer

from hivenb.strategy import HivemindStrategy
from strategy.peer import WideModel
from strategy.peers import Peer, Swarm, assert_they_met, difference

LOW_RANK = partial(PowerSGDGradientAverager, averager_rank=4, min_compression_ratio=0.5)


def assert_agree(peers: list[Peer], epochs: int) -> None:
    assert_they_met(peers)
    first, *others = [one.history() for one in peers]
    assert [*first] == [*range(1, epochs + 1)]
    for epoch, mine in first.items():
        for other in others:
            assert difference(mine, other[epoch]) < 1e-5


@pytest.mark.slow
def test_a_client_trains_with_a_peer_that_it_can_reach(train_together: Swarm) -> None:
    model = {"optimizer": torch.optim.AdamW, "lr": 0.05}
    peers = train_together(
        {"model": model, "epochs": 3}, {"model": model, "epochs": 3, "strategy": {"client_mode": True}}
    )
    assert_agree(peers, 3)


@pytest.mark.slow
def test_three_agree_when_they_average_gradients_of_a_low_rank_off_their_main_thread(train_together: Swarm) -> None:
    settings: dict[str, Any] = {
        "module": WideModel,
        "model": {"lr": 0.05},
        "epochs": 3,
        "target": 96,
        "threaded": True,
        "strategy": {"grad_averager_factory": LOW_RANK},
    }
    peers = train_together(*(settings,) * 3)
    assert_agree(peers, 3)
    assert difference(peers[0].parameters, parameters(WideModel())) > 1e-3


@pytest.mark.process
def test_one_that_is_alone_trains_with_them_too() -> None:
    """Off the main thread; with nobody to average with, gradients are as they are."""
    model, plain = WideModel(lr=0.05), WideModel(lr=0.05)
    strategy = HivemindStrategy(16, matchmaking_time=0.5, grad_averager_factory=LOW_RANK, **LOOPBACK)
    data = loader(64, 16)
    thread = threading.Thread(target=trainer(strategy, max_epochs=1).fit, args=(model, data))
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert strategy.hivemind_epoch == 4
    trainer("auto", max_epochs=1).fit(plain, data)
    assert difference(parameters(model), parameters(plain)) < 1e-5
