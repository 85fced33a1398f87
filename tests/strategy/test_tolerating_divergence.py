"""A step of a diverged state is no error for a while where all may return to a good one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hivenb.engine.optimizer.skipped_batches import MOST_IN_A_ROW, SkippedBatches
from hivenb.errors import NotFiniteError, UnbelievedStateError
from hivenb.strategy import rollback
from hivenb.strategy.counted_batches import CountedBatches
from hivenb.strategy.live_changes import Recovery
from hivenb.strategy.rollback import Rollback


class Stepping:
    """What of a training such a step needs."""

    dht: Any = None
    lightning_module: Any = SimpleNamespace(automatic_optimization=True)
    precision_plugin: Any = SimpleNamespace(optimizer_step=lambda *args, **kwargs: diverged())

    def __init__(self, roll_back: bool, num_peers: int = 2):
        progress = SimpleNamespace(num_peers=num_peers)
        self.options: Any = SimpleNamespace(auto_roll_back=roll_back, auxiliary=False)
        self.optimizer: Any = SimpleNamespace(
            skipped_batches=SkippedBatches(),
            tracker=SimpleNamespace(global_progress=progress),
            share_state=lambda shares: None,
        )
        self.rollback = Rollback(self)

    def notify(self, mark: str, text: str) -> None:
        raise AssertionError(text)

    def step(self, make: Callable[[], Any]) -> Any:
        return self.rollback.tolerating_divergence(make)


def made() -> str:
    return "made"


def diverged() -> None:
    raise UnbelievedStateError("no peer sends a state that can be believed")


def test_it_is_given_up_until_the_others_are_well() -> None:
    own = Stepping(True)
    assert [own.step(each) for each in (made, diverged, diverged, made)] == ["made", None, None, "made"]


def test_where_nobody_returns_by_itself_it_is_an_error() -> None:
    with pytest.raises(UnbelievedStateError):
        Stepping(False).step(diverged)


def test_nor_does_it_last_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollback, "DIVERGED_FOR", -1.0)
    with pytest.raises(UnbelievedStateError):
        Stepping(True).step(diverged)


def leave_out_too_many(own: Stepping) -> None:
    for _ in range(2 * MOST_IN_A_ROW):
        own.step(lambda: own.optimizer.skipped_batches.skip("the gradient of w is nan", "Its samples do not count"))


def test_batches_are_skipped_until_a_good_state_is_back() -> None:
    own = Stepping(True)
    leave_out_too_many(own)
    assert own.rollback._diverged_since is not None
    own.step(own.optimizer.skipped_batches.take)
    assert own.rollback._diverged_since is None, "the next divergence is given as long"


@pytest.mark.parametrize(("roll_back", "num_peers"), [(False, 2), (True, 1)], ids=["it is off", "nobody is there"])
def test_where_no_return_is_to_come_they_end_training(roll_back: bool, num_peers: int) -> None:
    with pytest.raises(NotFiniteError):
        leave_out_too_many(Stepping(roll_back, num_peers))


def test_who_was_with_others_in_its_last_round_is_not_alone_because_a_read_of_the_dht_fails() -> None:
    own = Stepping(True, num_peers=0)
    own.rollback.note_epoch(SimpleNamespace(epoch=5, group_size=2))  # type: ignore[arg-type]
    leave_out_too_many(own)
    own.rollback.note_epoch(SimpleNamespace(epoch=6, group_size=1))  # type: ignore[arg-type]
    with pytest.raises(NotFiniteError):
        leave_out_too_many(own)


def test_nor_are_they_skipped_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollback, "DIVERGED_FOR", -1.0)
    with pytest.raises(NotFiniteError):
        leave_out_too_many(Stepping(True))


def test_the_strategys_steps_are_such() -> None:
    own = Stepping(True)
    recovery = Recovery(own, make=lambda **settings: own.optimizer, go_on_with=lambda optimizer: None)
    batches = CountedBatches(own, recovery, own.rollback)
    assert batches.optimizer_step(own.optimizer, lambda: None) is None
    own.options.auto_roll_back = False
    with pytest.raises(UnbelievedStateError):
        batches.optimizer_step(own.optimizer, lambda: None)
