"""The thread that draws: paced, ordered, and never silent about an error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from hivenb.view.dashboard import Refresher


def ignore(error: Exception, kind: str) -> None:
    pass


def test_draws_at_a_bounded_pace(eventually: Callable[..., None]) -> None:
    times: list[float] = []
    refresher = Refresher(lambda: times.append(time.monotonic()), ignore, interval=0.05)
    refresher.start()
    eventually(lambda: len(times) >= 5)
    refresher.close()
    steps = [later - earlier for earlier, later in pairwise(times[:-1])]
    assert min(steps) >= 0.045


def test_slow_drawing_leaves_time_for_others(eventually: Callable[..., None]) -> None:
    starts: list[float] = []

    def draw() -> None:
        starts.append(time.monotonic())
        time.sleep(0.05)

    refresher = Refresher(draw, ignore, interval=0.001)
    refresher.start()
    eventually(lambda: len(starts) >= 3)
    refresher.close()
    assert starts[1] - starts[0] >= 0.19, "four times as long as it took"


def test_does_what_is_handed_in_at_once_in_order_and_on_its_own_thread(
    eventually: Callable[..., None],
) -> None:
    done: list[tuple[int, str]] = []
    refresher = Refresher(lambda: None, ignore, interval=60)
    refresher.start()
    for i in range(20):
        refresher.submit(lambda i=i: done.append((i, threading.current_thread().name)))
    eventually(lambda: len(done) == 20)
    assert done == [(i, "hivenb-dashboard") for i in range(20)]
    refresher.close()


def test_errors_are_kept_and_shown_and_the_thread_goes_on(
    eventually: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    shown: list[tuple[str, str]] = []

    def fail(message: str) -> Any:
        raise RuntimeError(message)

    refresher = Refresher(
        lambda: fail("cannot draw"), lambda error, kind: shown.append((str(error), kind)), interval=0.02
    )
    refresher.start()
    refresher.submit(lambda: fail("cannot act"))
    eventually(lambda: ("cannot act", "action") in shown and shown.count(("cannot draw", "draw")) >= 2)
    assert refresher.is_alive
    assert isinstance(refresher.error, RuntimeError)
    refresher.close()
    assert capfd.readouterr() == ("", ""), "a background thread prints nothing"


def test_an_error_while_showing_an_error_is_kept(eventually: Callable[..., None]) -> None:
    def cannot_show(error: Exception, kind: str) -> None:
        raise ValueError("no front end")

    refresher = Refresher(lambda: 1 / 0, cannot_show, interval=0.02)  # type: ignore[arg-type,return-value]
    refresher.start()
    eventually(lambda: isinstance(refresher.error, ValueError))
    assert refresher.is_alive
    refresher.close()


def test_close_draws_once_more_ends_the_thread_and_may_be_called_twice() -> None:
    frames: list[int] = []
    refresher = Refresher(lambda: frames.append(1), ignore, interval=60)
    refresher.start()
    refresher.close()
    seen = len(frames)
    assert seen >= 1
    assert not refresher.is_alive
    refresher.close()
    assert len(frames) == seen


def test_can_be_closed_from_its_own_thread(eventually: Callable[..., None]) -> None:
    refresher = Refresher(lambda: None, ignore, interval=0.02)
    refresher.start()
    refresher.submit(refresher.close)
    eventually(lambda: not refresher.is_alive)
