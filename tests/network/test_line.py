"""Packets come out of a line when, and as often as, it was asked for."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from network.line import Direction, Line

SIZE = 1250  # 10,000 bits


def send(line: Line, times: list[float], rate: float = 1e6) -> list[float | None]:
    direction = Direction(Random(1))
    return [direction.arrival(time, SIZE, line, rate) for time in times]


def test_one_packet_takes_the_delay_and_what_the_rate_makes_of_its_size() -> None:
    assert send(Line(delay=0.05), [1.0]) == [pytest.approx(1.0 + 0.01 + 0.05)]


def test_packets_come_at_the_rate_one_after_the_other() -> None:
    arrived = send(Line(queue=10.0), [0.0] * 100)
    assert arrived == [pytest.approx(0.01 * number) for number in range(1, 101)]


def test_what_does_not_fit_into_the_queue_is_dropped_and_later_ones_are_not() -> None:
    arrived = send(Line(queue=0.1), [0.0] * 20 + [0.2])
    assert sum(one is None for one in arrived) == 9
    assert arrived[-1] == pytest.approx(0.21)


def test_the_share_that_gets_lost_is_what_was_asked_for() -> None:
    arrived = send(Line(loss=0.1), [float(second) for second in range(10_000)])
    assert sum(one is None for one in arrived) / len(arrived) == pytest.approx(0.1, rel=0.1)


def test_nothing_goes_through_a_line_that_is_cut() -> None:
    assert send(Line() | {"is_cut": True}, [0.0, 1.0]) == [None, None]


@given(
    st.lists(st.floats(0.0, 0.1), min_size=1, max_size=50),
    st.floats(0.0, 0.2),
    st.floats(0.0, 0.2),
)
def test_no_packet_overtakes_another_or_comes_too_early(gaps: list[float], delay: float, jitter: float) -> None:
    times = [sum(gaps[: number + 1]) for number in range(len(gaps))]
    arrived = send(Line(delay=delay, jitter=jitter, queue=1e9), times)
    assert arrived == sorted(arrived)  # type: ignore[type-var]
    for number, (time, at) in enumerate(zip(times, arrived, strict=True)):
        assert at is not None
        assert time + delay + 0.01 <= at + 1e-9
        assert at <= times[-1] + (number + 1) * 0.01 + delay + jitter + 1e-9
