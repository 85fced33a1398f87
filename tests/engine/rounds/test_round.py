"""A round of averaging: cancelled by whoever is first, from any thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from tiny import TinyModel

from hivenb.engine.optimizer.optimizer import Optimizer

ROUNDS = 20


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
