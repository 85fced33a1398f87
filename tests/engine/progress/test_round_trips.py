"""Deadlines follow how long a peer's answers take."""

from __future__ import annotations

import math

import pytest

from hivenb.engine.progress.failure_detector import ANSWER_WITHIN, LONGEST_LINE, RoundTrips, _Sighting


def of(*seconds: float) -> RoundTrips:
    made = RoundTrips()
    for one in seconds:
        made.note(one)
    return made


def test_nothing_is_known_before_the_first_answer() -> None:
    assert RoundTrips().longest == 0


def test_answers_that_take_the_same_are_expected_soon() -> None:
    assert of(0.3).longest == pytest.approx(0.9)
    assert of(*[0.3] * 40).longest == pytest.approx(0.3, rel=0.01)


def test_an_uneven_line_is_given_more_than_its_longest_answer() -> None:
    uneven = [0.2, 0.5] * 20
    assert max(uneven) < of(*uneven).longest < 3 * max(uneven)


def test_a_line_is_as_long_as_its_quickest_answer_says_once_there_were_enough() -> None:
    assert RoundTrips().line == of(0.1, 0.1).line == 0
    assert of(2.0, 0.1, 0.4).line == 0.1  # the first one of which made the connection


def test_a_peer_is_given_what_its_line_takes_and_not_for_ever() -> None:
    sighting = _Sighting()
    assert sighting.answers_within(3.0) == 3.0
    assert sighting.answers_within(0.1) == ANSWER_WITHIN
    for _ in range(40):
        sighting.take_in(0.3, silence=0.0)
    assert sighting.answers_within(3.0) == pytest.approx(3.3, rel=0.01)
    sighting.take_in(1000.0, silence=0.0)
    assert sighting.answers_within(3.0) == LONGEST_LINE * 3.0


def test_who_does_not_answer_has_gone_if_it_ever_did() -> None:
    sighting = _Sighting()
    sighting.take_in(math.inf, silence=0.0)
    assert (sighting.is_gone, sighting.failures, sighting.round_trips.longest) == (False, 1, 0.0)
    sighting.take_in(0.1, silence=0.0)
    assert (sighting.is_gone, sighting.failures) == (False, 0)
    sighting.take_in(math.inf, silence=0.0)
    assert (sighting.is_gone, sighting.failures) == (True, 1)
