"""A step that needs the others' state, and is given ruined ones only, is given up for a while where all may return."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hivenb.errors import UnbelievedStateError
from hivenb.strategy import rolling_back
from hivenb.strategy.rolling_back import RollsBack


def outlasting(roll_back: bool, ruined: list[bool]) -> Any:
    """Such a step; it is ruined as the list says, one by one."""

    def step() -> str:
        if ruined.pop(0):
            raise UnbelievedStateError("no peer sends a state that can be believed")
        return "made"

    own: Any = SimpleNamespace(options=SimpleNamespace(roll_back=roll_back), _ruined_since=None)
    return RollsBack.outlasting_ruin(own, step)


def test_it_is_given_up_until_the_others_are_well() -> None:
    step = outlasting(True, [False, True, True, False])
    assert [step() for _ in range(4)] == ["made", None, None, "made"]


def test_where_nobody_returns_by_itself_it_is_an_error() -> None:
    with pytest.raises(UnbelievedStateError):
        outlasting(False, [True])()


def test_nor_does_it_last_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rolling_back, "RUINED_FOR", -1.0)
    with pytest.raises(UnbelievedStateError):
        outlasting(True, [True])()
