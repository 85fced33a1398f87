"""A peer that waits for the others' gradients, beside one that averages them in the background and reports first."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from in_memory.real_time import RealTimeDHT
from tiny import DELAYS, TinyModel, samples

from hivenb.engine.optimizer.optimizer import Optimizer

EPOCHS, BATCH = 5, 8


class Peer:
    """Trains in a thread of its own.

    :param seconds: that it takes to a batch
    :param options: of its optimizer
    """

    #: seconds for which it stands still once, amid an epoch in which it has a group already
    stall = 0.0

    def __init__(self, dht: RealTimeDHT, run_id: str, seconds: float, options: dict[str, Any]):
        self.model, self.seconds = TinyModel(), seconds
        self.optimizer = Optimizer(
            dht=dht,
            run_id=run_id,
            optimizer=partial(torch.optim.Adam, lr=0.01),
            params=list(self.model.parameters()),
            target_batch_size=16 * BATCH,
            matchmaking_time=1.0,
            averaging_timeout=20.0,
            tracker_opts={"min_refresh_period": 0.05, "default_refresh_period": 0.1},
            **options,
        )
        self.computed, self.counted, self.groups = 0, 0, list[int]()
        self.optimizer._on_epoch = lambda report: self._note(report.samples, report.group_size)
        self.optimizer.begin()

    def _note(self, count: int, group_size: int) -> None:
        self.counted += count
        self.groups.append(group_size)

    def train(self) -> None:
        while self.optimizer.local_epoch < EPOCHS:
            self.optimizer.zero_grad()
            x, y = samples(BATCH, seed=self.computed)
            time.sleep(self.seconds)
            if self.stall and self.optimizer.local_epoch == 2 and self.optimizer.rounds.has_group:
                time.sleep(self.stall)
                self.stall = 0.0
            torch.nn.functional.mse_loss(self.model.layer(x), y).backward()
            self.computed += BATCH
            self.optimizer.step(batch_size=BATCH)


def train_both(quick: Peer, slow: Peer, eventually: Callable[..., None]) -> None:
    """Until both have come to the last epoch."""
    eventually(lambda: all(one.optimizer.tracker.global_progress.num_peers == 2 for one in (quick, slow)))
    threads = [threading.Thread(target=one.train, daemon=True) for one in (quick, slow)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
            assert not thread.is_alive()
    finally:
        for one in (quick, slow):
            one.optimizer.shutdown()


@pytest.mark.parametrize("delays", [DELAYS, {}], ids=["in the background", "synchronous"])
def test_a_slow_peer_that_waits_for_the_others_takes_part_in_each_round(
    memory_dht: RealTimeDHT,
    joining_memory_dht: RealTimeDHT,
    run_id: str,
    delays: dict[str, bool],
    eventually: Callable[..., None],
) -> None:
    """When its batch ends, a quicker one has reported the next epoch, and waits for its gradients all the same.

    Where no group has met by then, the slow one learns that from the state that it downloads, once.
    """
    quick = Peer(memory_dht, run_id, 0.1, delays)
    slow = Peer(joining_memory_dht, run_id, 0.5, {})
    train_both(quick, slow, eventually)
    assert slow.optimizer.state_averager.states_taken <= 1
    assert slow.computed - slow.counted <= 6 * BATCH, "what it has computed for one epoch at most does not count"
    assert slow.groups == [2] * EPOCHS
    assert set(quick.groups[1:]) == {2}, "of the round before, in the background"


def test_one_that_the_others_have_given_up_does_not_take_its_group_for_one_that_waits(
    memory_dht: RealTimeDHT, joining_memory_dht: RealTimeDHT, run_id: str, eventually: Callable[..., None]
) -> None:
    """It would step with its own gradients, and have other moments from then on."""
    quick, slow = (
        Peer(dht, run_id, seconds, {"next_chunk_timeout": 1.0})
        for dht, seconds in ((memory_dht, 0.1), (joining_memory_dht, 0.2))
    )
    slow.stall = 5.0
    train_both(quick, slow, eventually)
    assert slow.stall == 0.0, "it has stood still"
    assert set(slow.groups) == {2}
    assert slow.optimizer.state_averager.states_taken >= 1
