"""A peer whose loss has exploded, and that is not the host, holds until all return, and lets no round wait for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hivenb.figures.history import History
from hivenb.run.pause_and_stop import Stage
from hivenb.run.status import RunState
from hivenb.run.swarm_rollback import RollingBack


class Exploded:
    """Of a strategy whose loss has exploded, what a return needs to know.

    :param due_after: looks after which a return is due
    """

    is_returning, is_about_to_fail, may_return, is_alone = False, True, True, False

    def __init__(self, due_after: int) -> None:
        self.optimizer = SimpleNamespace(rounds=self)
        self.rollback = self
        self.loss_watch: Any = None
        self.did: list[str] = []
        self._looks_left = due_after

    def leave(self, wait: bool) -> None:
        assert not wait, "the round may last as long as its others do"
        self.did.append("left its rounds")

    @property
    def is_return_due(self) -> bool:
        self.did.append("looked")
        self._looks_left -= 1
        return self._looks_left < 0


def begin(strategy: Exploded, not_host_reason: str | None) -> Stage:
    stage = Stage()
    stage.enter(RunState.TRAINING)
    rolling_back = RollingBack(stage, History())
    rolling_back.begin(strategy)  # type: ignore[arg-type]
    rolling_back.join(SimpleNamespace(returned=None, is_alone=False, not_host_reason=not_host_reason))  # type: ignore[arg-type]
    strategy.loss_watch = SimpleNamespace(has_exploded=True)
    return stage


def test_it_leaves_its_rounds_before_it_holds():
    strategy = Exploded(due_after=2)
    begin(strategy, "another peer is the host")
    strategy.on_explosion()
    assert strategy.did == ["left its rounds", "looked", "looked", "looked"]


@pytest.mark.parametrize("state", [RunState.STOPPING, RunState.PAUSED])
def test_it_holds_no_longer_than_its_run_trains(state):
    strategy = Exploded(due_after=10**9)
    stage = begin(strategy, "another peer is the host")
    stage.hand_in(lambda: stage.enter(state))
    strategy.on_explosion()
    assert strategy.did[0] == "left its rounds"
