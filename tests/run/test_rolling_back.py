"""A run whose parameters are ruined returns to its last good state: by hand, by itself, and all peers together."""

from __future__ import annotations

import copy
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny
import torch

import hivenb
from hivenb.errors import NotFiniteError, TrainingError
from hivenb.options import Options
from hivenb.run.status import RunState
from hivenb.training import TrainingRun

pytestmark = pytest.mark.process

#: Seconds that anything may take; the machine may be busy.
PATIENCE = 90.0

#: Beyond what the parameters of this model are in any training.
RUINED = 100.0


class Ruinable(tiny.PacedModel):
    """Its parameters can be ruined at any time, for the next batch, or the first one from a swarm epoch on."""

    def __init__(self) -> None:
        super().__init__(optimizer=torch.optim.Adam, lr=0.02)
        self.ruin: float | None = None
        self.ruin_from = 0
        self.has_ruined = threading.Event()
        #: at the beginning of each batch: the epoch, whether the parameters are well, and whether others can have them
        self.seen: list[tuple[int, bool, bool]] = []

    def on_train_batch_start(self, *args: Any) -> None:
        strategy = self.trainer.strategy
        shares = strategy.optimizer.state_averager.allow_state_sharing
        self.seen.append((strategy.hivemind_epoch, self.is_well, shares))
        if self.ruin is not None and strategy.hivemind_epoch >= self.ruin_from:
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.mul_(self.ruin)
            self.ruin = None
            self.has_ruined.set()

    @property
    def is_well(self) -> bool:
        return all(bool((parameter.abs() < RUINED).all()) for parameter in self.parameters())

    def __deepcopy__(self, memo: Any) -> Ruinable:
        copied = Ruinable()
        copied.load_state_dict(copy.deepcopy(self.state_dict(), memo))
        return copied


@pytest.fixture(scope="module")
def swarm() -> Iterator[hivenb.Swarm]:
    with hivenb.Swarm("rollback") as opened:
        yield opened


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Iterator[Callable[..., TrainingRun]]:
    """Starts runs of one name, each in a swarm of its own if wished; they end with the test."""
    runs: list[TrainingRun] = []

    def make(swarm: hivenb.Swarm, is_large: bool = False, **options: Any) -> TrainingRun:
        defaults = {"target_batch_size": 32, "snapshot_every": 5, "matchmaking_time": 1.0, "averaging_timeout": 20.0}
        name = re.sub(r"\W", "-", request.node.name)
        chosen = Options(**{**defaults, "run_id": f"rollback-{name}", **options})
        model = tiny.in_large_batches(Ruinable()) if is_large else Ruinable()
        data = tiny.large_batches(shuffle=True) if is_large else tiny.loader(shuffle=True)
        runs.append(TrainingRun(model, data, swarm=swarm, options=chosen, accelerator="cpu"))
        runs[-1].start()
        return runs[-1]

    yield make
    for run in runs:
        run.stop()


@pytest.fixture
def three_runs(start, eventually) -> Iterator[list[TrainingRun]]:
    """All return by themselves; the first two have kept the same state, and the third keeps none."""
    with (
        hivenb.Swarm("first") as first,
        hivenb.Swarm("second", initial_peers=first.invite) as second,
        hivenb.Swarm("third", initial_peers=first.invite) as third,
    ):
        # an epoch a second: each costs all peers two rounds
        options = {"target_batch_size": 1200, "snapshot_every": 2, "auto_roll_back": True, "is_large": True}
        runs = [start(first, **options)]
        eventually(lambda: runs[0].status.epoch > 0, PATIENCE)
        runs += [start(second, **options), start(third, **{**options, "snapshot_every": None})]
        for run in runs:
            eventually(lambda run=run: run.status.num_peers == 3 and run.status.step > 40, PATIENCE)
        eventually(
            lambda: (runs[1].snapshot_epoch or 0) > 0 and runs[0].snapshot_epoch == runs[1].snapshot_epoch, PATIENCE
        )
        yield runs
        for run in runs:
            run.stop()


def returns(run: TrainingRun) -> list[str]:
    return [event.text for event in run.history.snapshot().events if event.kind == "rollback"]


def test_a_click_brings_the_last_good_state_back_and_another_one_loses_nothing(swarm, start, eventually):
    run = start(swarm)
    eventually(lambda: (run.snapshot_epoch or 0) >= 5, PATIENCE)
    run.model.ruin = 1e3
    assert run.model.has_ruined.wait(PATIENCE)
    before = run.status.epoch
    kept = run.roll_back()
    assert run.wait(epochs=1, timeout=PATIENCE)
    assert run.model.is_well
    assert (kept, returns(run)) == (5 * (kept // 5), [f"returned to the state of epoch {kept}"])
    assert run.status.epoch > before, "the swarm epoch goes on"
    again = run.roll_back()
    assert again >= kept
    assert run.wait(epochs=1, timeout=PATIENCE)
    assert run.model.is_well
    assert len(returns(run)) == 2


def test_before_there_is_a_good_state_or_where_none_is_kept_it_says_so(swarm, start):
    run = start(swarm, snapshot_every=None)
    assert run.wait(epochs=2, timeout=PATIENCE)
    with pytest.raises(TrainingError, match="no snapshot is taken"):
        run.roll_back()
    other = TrainingRun(Ruinable(), tiny.loader(), swarm=swarm, options=Options(target_batch_size=32, run_id="unborn"))
    with pytest.raises(TrainingError, match="there is no snapshot yet"):
        other.roll_back()
    assert run.is_active


def test_what_is_not_finite_ends_a_run_which_returns_when_it_starts_again(swarm, start, eventually):
    run = start(swarm)
    eventually(lambda: run.snapshot_epoch is not None, PATIENCE)
    run.model.ruin = float("nan")
    with pytest.raises(NotFiniteError):
        run.wait(timeout=PATIENCE)
    run.roll_back()
    run.start()
    assert run.wait(epochs=2, timeout=PATIENCE)
    assert run.model.is_well
    assert len(returns(run)) == 1


def test_a_run_that_begins_at_a_checkpoint_has_no_state_from_before_that(swarm, start, eventually, tmp_path):
    run = start(swarm)
    eventually(lambda: run.snapshot_epoch is not None, PATIENCE)
    run.stop()
    saved = shutil.copy(run.kept_folder.checkpoint, tmp_path / "saved.ckpt")
    before = run.snapshot_epoch
    begun = []
    run.model.on_train_start = lambda: begun.append(run.snapshot_epoch)
    run.start()
    assert run.wait(steps=2, timeout=PATIENCE)
    run.stop()
    run.start(saved)
    assert run.wait(steps=2, timeout=PATIENCE)
    assert begun == [before, None]


@pytest.mark.parametrize("factor", [1e4, float("nan")])
def test_a_switch_does_it_by_itself(swarm, start, eventually, factor):
    run = start(swarm, auto_roll_back=True)
    eventually(lambda: run.snapshot_epoch is not None and run.status.step > 40, PATIENCE)
    run.model.ruin = factor
    eventually(lambda: returns(run), PATIENCE)
    assert run.wait(epochs=2, timeout=PATIENCE)
    assert run.model.is_well
    assert run.status.state is RunState.TRAINING


def test_a_paused_run_returns_and_stays_paused(swarm, start, eventually):
    run = start(swarm)
    eventually(lambda: run.snapshot_epoch is not None, PATIENCE)
    run.model.ruin = 1e3
    assert run.model.has_ruined.wait(PATIENCE)
    run.pause()
    assert run.wait_for(RunState.PAUSED, PATIENCE)
    run.roll_back()
    assert run.model.is_well
    assert run.status.state is RunState.PAUSED
    run.resume()
    assert run.wait(epochs=1, timeout=PATIENCE)


@pytest.mark.parametrize("factor", [1e3, pytest.param(float("nan"), marks=pytest.mark.long)])
@pytest.mark.slow
def test_all_peers_return_together_and_one_without_that_state_downloads_it(three_runs, eventually, factor):
    runs = three_runs
    with pytest.raises(TrainingError, match="cannot roll the run back"):
        runs[1].roll_back()
    before = [run.status.epoch for run in runs]
    for run in runs:  # all in one epoch, as an average would have done
        run.model.ruin_from, run.model.ruin = max(before) + 2, factor
    eventually(lambda: returns(runs[0]), PATIENCE)
    for run, epoch in zip(runs, before, strict=True):
        assert run.wait(epochs=3, timeout=PATIENCE)
        assert run.model.is_well
        assert run.status.epoch > epoch
    assert not returns(runs[2]), "it has downloaded the state"
    eventually(lambda: runs[0].strategy.last_epoch_report.group_size == 3, PATIENCE)


@pytest.mark.slow
def test_peers_that_reach_the_epoch_of_a_return_before_anybody_has_returned_do_so(three_runs, eventually, monkeypatch):
    runs = three_runs
    monkeypatch.setattr("hivenb.run.swarm_rollback.NOTICE", 1000.0)  # nobody is the first before that epoch
    # as if it had downloaded the state of that epoch from a peer that has not returned yet
    monkeypatch.setattr(runs[1].strategy.rollback, "note_epoch", lambda report: None)
    ruined_from = max(run.status.epoch for run in runs) + 2
    for run in runs:
        run.model.ruin_from, run.model.ruin = ruined_from, 1e3
    eventually(lambda: returns(runs[0]), PATIENCE)
    for run in runs:
        assert run.wait(epochs=3, timeout=PATIENCE)
        assert run.model.is_well
    assert [bool(returns(run)) for run in runs] == [True, True, False]
    eventually(lambda: runs[0].strategy.last_epoch_report.group_size == 3, PATIENCE)
    for run in runs:
        run.stop()
    at = max(epoch for epoch, is_well, _ in runs[0].model.seen if not is_well)
    for run in (runs[0], runs[2]):
        of_then = [shares for epoch, is_well, shares in run.model.seen if epoch == at and not is_well]
        assert set(of_then) == {False}, "a newcomer would download what is about to be left"
        assert run.model.seen[-1][2], "its state is to be had again"
    assert all(shares for epoch, is_well, shares in runs[0].model.seen if epoch == at and is_well), "and at once"
