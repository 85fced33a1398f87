"""What lines allow, reckoned by hand."""

from __future__ import annotations

import pytest
from line_rate import seconds_allowed
from network.line import Line

#: Bytes of all numbers of a peer: 1 s at 8 Mbit/s.
SIZE = 1e6

SLOW, FAST, UNEVEN = Line(up=8e6, down=8e6), Line(up=80e6, down=80e6), Line(up=8e6, down=80e6)


@pytest.mark.parametrize(
    ("lines", "seconds"),
    [
        ([SLOW, SLOW], 1.0),
        ([SLOW, FAST], 1.0),
        ([SLOW] * 4, 1.5),
        ([UNEVEN] * 4, 1.5),
        ([SLOW, SLOW, FAST, FAST], 1.0),
        ([SLOW, SLOW, SLOW], 4 / 3),
    ],
    ids=["two alike", "two", "four alike", "four that send slowly", "the fast average all", "three alike"],
)
def test_the_slowest_line_sets_the_pace(lines: list[Line], seconds: float) -> None:
    assert seconds_allowed(lines, SIZE) == pytest.approx(seconds)
