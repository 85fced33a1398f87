"""A round that fails costs an epoch the gradients of the others, never one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from in_memory.real_time import RealTimeDHT
from tiny import TinyModel, parameters, train

from hivenb.engine.optimizer.optimizer import Optimizer
from hivenb.engine.optimizer.scheduled_rounds import EpochReport
from hivenb.engine.progress.tracker import ProgressTracker

OFFLOADED = {"optimizer": partial(torch.optim.SGD, lr=0.1), "offload_optimizer": True}
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "reused gradient buffers": {"reuse_grad_buffers": True},
    "offloaded": OFFLOADED,
    "all delays": {
        **OFFLOADED,
        "delay_optimizer_step": True,
        "delay_grad_averaging": True,
        "delay_state_averaging": True,
    },
}


@pytest.fixture
def make_optimizer(make_optimizer_in_memory: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    """Without processes."""
    return make_optimizer_in_memory


@pytest.fixture
def somebody_who_joins_no_group(joining_memory_dht: RealTimeDHT, run_id: str) -> Iterator[ProgressTracker]:
    """A peer on the swarm's list, as one looks whose averagers nobody can reach."""
    tracker = ProgressTracker(joining_memory_dht, run_id, 1000, private_key=joining_memory_dht.private_key, start=True)
    tracker.announce()
    yield tracker
    tracker.shutdown(5)
    tracker.join(10)


@pytest.mark.parametrize("mode", MODES)
def test_the_step_is_made_with_ones_own_gradients(
    mode: str,
    make_optimizer: Callable[..., Optimizer],
    somebody_who_joins_no_group: ProgressTracker,
    eventually: Callable[..., None],
) -> None:
    """hivemind resets the accumulators when a round begins, and after one that failed steps with zeros."""
    plain, model = TinyModel(), TinyModel()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 1)
    reports: list[EpochReport] = []
    kwargs = MODES[mode]
    kwargs = {"params": list(model.parameters()), **kwargs} if "optimizer" in kwargs else kwargs
    optimizer = make_optimizer(model.parameters(), averaging_timeout=2.0, on_epoch=reports.append, **kwargs)
    optimizer.begin()
    eventually(lambda: optimizer.tracker.global_progress.num_peers == 2)
    train(model, optimizer, 1, batch_size=1001)
    optimizer.finish_delayed_updates()
    assert [report.group_size for report in reports] == [1]
    if mode != "all delays":  # there it is known only afterwards
        assert "averaging_timeout=2.0" in str(reports[0].failed) or "could not find a group" in str(reports[0].failed)
    for expected, got in zip(parameters(plain), parameters(model), strict=True):
        assert torch.allclose(expected, got, atol=1e-6)


@pytest.mark.parametrize("who", ["this peer", "the other"])
def test_a_round_that_is_given_up_because_somebody_leaves_has_not_failed(
    who: str,
    make_optimizer: Callable[..., Optimizer],
    somebody_who_joins_no_group: ProgressTracker,
    eventually: Callable[..., None],
) -> None:
    model, reports = TinyModel(), list[EpochReport]()
    optimizer = make_optimizer(model.parameters(), averaging_timeout=60.0, on_epoch=reports.append)
    optimizer.begin()
    eventually(lambda: optimizer.tracker.global_progress.num_peers == 2)
    with ThreadPoolExecutor(1) as training:
        trained = training.submit(train, model, optimizer, 1, batch_size=1001)
        eventually(lambda: any(not one.done() for one in optimizer.grad_averager._rounds))
        if who == "this peer":
            optimizer.retire()
        else:
            somebody_who_joins_no_group.step_aside()
        trained.result(30)
    assert [(report.group_size, report.failed) for report in reports] == [(1, None)]
