"""The clock of an optimizer's steps: stands still while gradients are computed, whatever becomes of that."""

from __future__ import annotations

import pytest

from hivenb.engine.optimizer import optimizer
from hivenb.engine.optimizer.optimizer import StepClock


class Time:
    """Goes on when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr(optimizer, "time", made)
    return made


def step(clock: StepClock, time: Time, before: float, computing: float, after: float) -> None:
    def compute() -> None:
        time.now += computing

    with clock:
        time.now += before
        closure = clock.paused(compute)
        assert closure is not None
        closure()
        time.now += after


def test_it_leaves_out_the_computing_and_what_is_between_steps(time: Time) -> None:
    clock = StepClock()
    step(clock, time, before=1, computing=10, after=2)
    time.now += 50
    step(clock, time, before=4, computing=10, after=8)
    assert clock.restart() == 15
    assert clock.restart() == 0


def test_within_a_step_it_begins_anew(time: Time) -> None:
    clock = StepClock()
    with clock:
        time.now += 3
        assert clock.restart() == 3
        time.now += 5
    assert clock.restart() == 5


def test_a_closure_that_fails_is_skipped_as_well(time: Time) -> None:
    clock = StepClock()

    def fail() -> None:
        time.now += 10
        raise OverflowError("the loss is too large")

    def failing_step() -> None:
        with clock:
            time.now += 1
            clock.paused(fail)()  # type: ignore[misc]

    with pytest.raises(OverflowError, match="too large"):
        failing_step()
    time.now += 50
    assert clock.restart() == 1


def test_a_step_without_a_closure_has_none(time: Time) -> None:
    assert StepClock().paused(None) is None
