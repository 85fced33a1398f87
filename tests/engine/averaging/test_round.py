"""A round of averaging: cancelled by whoever is first, from any thread."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tiny import TinyModel

from hivenb.engine.optimizer.optimizer import Optimizer

ROUNDS = 20


@pytest.fixture
def make_optimizer(make_optimizer_in_memory: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    """Without processes."""
    return make_optimizer_in_memory


def test_threads_may_cancel_at_the_same_time(make_optimizer: Callable[..., Optimizer]) -> None:
    """hivemind raises InvalidStateError in the second one, and RuntimeError in one that runs an event loop."""
    averager: Any = make_optimizer(TinyModel().parameters()).grad_averager
    failures: list[BaseException] = []

    for _ in range(ROUNDS):
        control = averager.schedule_step(timeout=20.0)
        barrier = threading.Barrier(3)

        async def cancel_in_a_loop(control: Any = control, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            control.cancel()

        def cancel(control: Any = control, barrier: threading.Barrier = barrier) -> None:
            try:
                barrier.wait()
                control.cancel()
            except BaseException as e:
                failures.append(e)

        def run_loop(cancel_in_a_loop: Any = cancel_in_a_loop) -> None:
            try:
                asyncio.run(cancel_in_a_loop())
            except BaseException as e:
                failures.append(e)

        threads = [threading.Thread(target=target) for target in (cancel, cancel, run_loop)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert control.cancelled()
        assert not control.cancel()
    assert not failures


def test_one_that_is_begun_too_late_comes_to_nothing_without_a_word(
    make_optimizer: Callable[..., Optimizer], caplog: pytest.LogCaptureFixture
) -> None:
    """A peer that stops gives up its rounds at any moment, also just before its training thread begins one."""
    averager: Any = make_optimizer(TinyModel().parameters()).grad_averager
    with caplog.at_level(logging.WARNING):
        given_up = averager.schedule_step(timeout=20.0)
        given_up.desert()
        assert averager.step(control=given_up, wait=False).cancelled()
        averager.notify_used_averaged_gradients()
        averager.retire()
        assert averager.step(wait=False, timeout=20.0).cancelled()
        begun_twice = averager.schedule_step(timeout=20.0)
        begun_twice.allow_allreduce()
        begun_twice.allow_allreduce()
    assert not caplog.records
