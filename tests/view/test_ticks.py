"""Ticks: round numbers, each label different from its neighbours, with its unit, never more than fit."""

from __future__ import annotations

import math

import pytest

from hivenb.view.charts.ticks import byte_ticks, log_ticks, number_ticks, time_ticks


@pytest.mark.parametrize(
    ("end", "labels"),
    [
        (10.0, ["0 s", "2 s", "4 s", "6 s", "8 s", "10 s"]),
        (100.0, ["0 s", "20 s", "40 s", "60 s", "80 s", "100 s"]),
        (600.0, ["0 min", "2 min", "4 min", "6 min", "8 min", "10 min"]),
        (7 * 3600.0, ["0 h", "2 h", "4 h", "6 h"]),
        (3 * 86400.0, ["0 d", "1 d", "2 d", "3 d"]),
    ],
)
def test_time_has_round_ticks_with_a_unit(end: float, labels: list[str]) -> None:
    assert time_ticks(end, 5)[1] == labels


@pytest.mark.parametrize("end", [1e-3, 1, 13, 59, 61, 3599, 3601, 1e5, 1e7, 1e9])
@pytest.mark.parametrize("most", [2, 5, 9])
def test_time_ticks_fit_and_differ(end: float, most: int) -> None:
    places, labels = time_ticks(end, most)
    assert 1 <= len(places) <= most + 1
    assert places[-1] <= end
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize(
    ("low", "high", "most", "how", "labels"),
    [
        (0, 4.2, 5, {"whole": True}, ["0", "1", "2", "3", "4"]),
        (0, 1.25, 6, {"whole": True}, ["0", "1"]),
        (1.7, 2.9, 5, {}, ["1.75", "2.00", "2.25", "2.50", "2.75"]),
        (0.2, 1.0, 5, {"percent": True}, ["20 %", "40 %", "60 %", "80 %", "100 %"]),
        (0.985, 0.995, 4, {"percent": True}, ["98.50 %", "98.75 %", "99.00 %", "99.25 %", "99.50 %"]),
        (0, 12000, 4, {}, ["0", "5k", "10k"]),
        (0, 6000, 4, {}, ["0", "2k", "4k", "6k"]),
    ],
)
def test_numbers_have_as_many_digits_as_they_need(
    low: float, high: float, most: int, how: dict[str, bool], labels: list[str]
) -> None:
    assert number_ticks(low, high, most, **how)[1] == labels


@pytest.mark.parametrize("size", [1e-7, 1e-3, 0.3, 1, 77, 1e4, 3e8])
@pytest.mark.parametrize("offset", [0, 1, 5])
@pytest.mark.parametrize("most", [2, 5])
def test_number_ticks_fit_and_differ(size: float, offset: float, most: int) -> None:
    low, high = offset * size, (offset + 1.3) * size
    places, labels = number_ticks(low, high, most)
    assert 1 <= len(places) <= most + 1
    assert len(set(labels)) == len(labels)
    assert all(low - size * 1e-4 <= place <= high + size * 1e-4 for place in places)


@pytest.mark.parametrize(
    ("high", "labels"),
    [
        (900, ["0", "250 B", "500 B", "750 B"]),
        (1.3e6, ["0", "0.5 MB", "1.0 MB"]),
        (2.2e9, ["0", "1 GB", "2 GB"]),
    ],
)
def test_bytes_have_round_ticks_with_a_unit(high: float, labels: list[str]) -> None:
    assert byte_ticks(0, high, 4 if high < 1e3 else 3)[1] == labels


@pytest.mark.parametrize(
    ("low", "high", "most", "labels"),
    [
        (0.1, 100, 4, ["0.1", "1", "10", "100"]),
        (0.09, 2.4, 5, ["0.1", "0.2", "0.5", "1", "2"]),
        (1e-9, 1e3, 4, ["1e-09", "1e-05", "0.1", "1,000"]),
    ],
)
def test_logarithmic_ticks_are_round(low: float, high: float, most: int, labels: list[str]) -> None:
    assert log_ticks(math.log10(low), math.log10(high), most)[1] == labels


@pytest.mark.parametrize("low", [-9.0, -1.9, -0.3, 0.01, 2.7, 5.99])
@pytest.mark.parametrize("size", [0.001, 0.02, 0.2, 1, 3, 30])
@pytest.mark.parametrize("most", [2, 3, 6])
def test_logarithmic_ticks_fit_and_differ(low: float, size: float, most: int) -> None:
    places, labels = log_ticks(low, low + size, most)
    assert 1 <= len(places) <= most + 1
    assert len(set(labels)) == len(labels)
    assert all(low - 1e-3 * size <= place <= low + size * 1.001 for place in places)
