"""A return as it travels: what was decided, or nothing at all."""

from __future__ import annotations

from typing import Any

import pytest

from hivenb.swarm.agreement.options_record import Return


def test_what_is_packed_is_what_arrives() -> None:
    returned = Return(to=40, at=53)
    assert Return.parse(returned.pack()) == returned
    assert Return.parse(None) is None


@pytest.mark.parametrize(
    "value", [[1], [1, 2, 3], "12", {"to": 1}, [2, 1], [-1, 1], [0.5, 1], [True, 1], [0, 10**30], [0, float("inf")], 7]
)
def test_what_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="return"):
        Return.parse(value)
