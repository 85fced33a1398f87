"""Values of strangers: of the type that is meant and within bounds, or a ValueError and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from hivenb.engine.network.untrusted_values import MAX_WHOLE, finite, named, raw, sequence, text, truth, whole

CHECKS: list[tuple[Callable[[Any], Any], list[Any], list[Any]]] = [
    (lambda value: whole(value, most=8), [0, 3, 8], [True, -1, 9, 10**400, 3.0, math.inf, math.nan, "3", None, [3]]),
    (lambda value: finite(value, most=8.0), [0, 0.5, 8.0], [True, -0.1, 8.1, math.inf, -math.inf, math.nan, 10**400]),
    (truth, [True, False], [0, 1, None, "True", []]),
    (lambda value: text(value, 8), ["", "x" * 8], ["x" * 9, b"x", None, 7, ["x"]]),
    (lambda value: raw(value, 8, least=1), [b"x", b"x" * 8], [b"", b"x" * 9, "x", None, [1], bytearray(b"x")]),
    (lambda value: sequence(value, 8), [[], [1] * 8], [[1] * 9, {}, "x", b"x", None, 7]),
    (lambda value: named(value, 2), [{}, {"a": 1, "b": 2}], [{"a": 1, "b": 2, "c": 3}, {1: 2}, [], None, "a"]),
]


@pytest.mark.parametrize(("check", "good", "bad"), CHECKS)
def test_what_is_within_bounds_passes_and_all_else_is_a_value_error(
    check: Callable[[Any], Any], good: list[Any], bad: list[Any]
) -> None:
    assert [check(value) for value in good] == good
    for value in bad:
        with pytest.raises(ValueError, match=r"^n(ot|either) "):
            check(value)


def test_a_whole_number_survives_a_float() -> None:
    assert whole(int(float(MAX_WHOLE))) == MAX_WHOLE
    with pytest.raises(ValueError, match="whole"):
        whole(MAX_WHOLE + 1)
