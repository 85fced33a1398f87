"""Two runs in one process: of one name, of one model, side by side."""

from __future__ import annotations

import copy
import gc
import threading

import pytest
import tiny
import torch
from torch.optim.lr_scheduler import LambdaLR

import hivenb
from hivenb.errors import OptionsError, TrainingError
from hivenb.options import Options
from hivenb.run.status import RunState
from hivenb.training import TrainingRun

#: Seconds that anything may take; the machine may be busy.
PATIENCE = 60.0


@pytest.fixture(scope="module")
def home():
    with hivenb.Swarm("succession") as swarm:
        yield swarm


@pytest.fixture
def make(home):
    runs: list[TrainingRun] = []

    def make_run(name: str, model=None) -> TrainingRun:
        options = Options(target_batch_size=32, run_id=name, matchmaking_time=2.0)
        model = tiny.PacedModel() if model is None else model
        runs.append(TrainingRun(model, tiny.loader(), swarm=home, options=options, accelerator="cpu"))
        return runs[-1]

    make_run.runs = runs
    yield make_run
    for run in runs:
        run.stop()
    home.remove_local_peers()


class WiderModel(tiny.PacedModel):
    """Has one parameter more."""

    def __init__(self):
        super().__init__()
        self.more = torch.nn.Parameter(torch.zeros(3))


def marks(run: TrainingRun) -> list[str]:
    return [event.text for event in run.history.snapshot().events]


@pytest.mark.parametrize("same_model", [False, True], ids=["cells run again", "one cell run again"])
def test_a_new_run_of_a_name_takes_the_place_of_the_old_one(make, same_model):
    old = make("again")
    old.start()
    assert old.wait(epochs=2, timeout=PATIENCE)
    new = make("again", old.model if same_model else None)
    with pytest.warns(
        UserWarning, match=r"'again' trains in this swarm already: it stops, and this one takes its place"
    ):
        new.start()
    assert new.wait(epochs=2, timeout=PATIENCE)
    assert (old.status.state, old.status.error) == (RunState.STOPPED, None)
    assert "replaced by a newer one" in marks(old)
    assert "took the place of an older one" in marks(new)
    assert new.status.state is RunState.TRAINING
    with pytest.warns(UserWarning, match="takes its place"):
        old.start()  # the button of the dashboard that stands further up
    assert old.wait(epochs=1, timeout=PATIENCE)
    assert new.status.state is RunState.STOPPED


def test_local_peers_of_the_old_run_leave_and_those_of_the_new_one_train_with_it(make, home, eventually):
    old = make("neighbours")
    home.add_local_peers(1, old)
    old.start()
    eventually(lambda: len(old.peers()) == 2, PATIENCE)
    new = make("neighbours")
    (stays,) = home.add_local_peers(1, new)
    assert new.local_peers == (stays,)
    with pytest.warns(UserWarning, match="stops, and its 1 local peers leave"):
        new.start()
    eventually(lambda: home.local_peers == (stays,), PATIENCE)
    eventually(lambda: len(new.peers()) == 2 and new.history.snapshot().last("group_size") == 2, PATIENCE)
    assert old.local_peers == ()


@pytest.mark.parametrize("is_forgotten", [False, True], ids=["stopped", "gone"])
def test_local_peers_of_a_run_that_has_ended_leave_as_well(make, home, eventually, is_forgotten):
    old = make("ended")
    home.add_local_peers(1, old)
    old.start()
    eventually(lambda: len(old.peers()) == 2, PATIENCE)
    old.stop()
    if is_forgotten:
        old = None
        make.runs.clear()
        gc.collect()
    new = make("ended", WiderModel())  # which would not go with theirs
    with pytest.warns(UserWarning, match="1 local peers of an older run named 'ended' are still in this swarm"):
        new.start()
    assert new.wait(epochs=2, timeout=PATIENCE)
    assert home.local_peers == ()
    assert new.status.state is RunState.TRAINING


def test_local_peers_follow_their_run_to_another_name(make, home, eventually):
    run = make("first-name")
    (local,) = home.add_local_peers(1, run)
    run.start()
    eventually(lambda: len(run.peers()) == 2, PATIENCE)
    run.stop()
    run.apply(run_id="second-name")
    run.start()
    eventually(lambda: len(run.peers()) == 2, PATIENCE)
    eventually(lambda: run.history.snapshot().last("group_size") == 2, PATIENCE)
    assert (local.state, local.run_id) == ("training", "second-name")


def test_options_that_local_peers_cannot_follow_change_nothing(make, home):
    run, lock = make("locked"), threading.Lock()
    home.add_local_peers(1, run)
    run.start()
    assert run.wait(epochs=1, timeout=PATIENCE)
    before = run.options
    with pytest.raises(OptionsError, match="scheduler_fn="):
        run.apply(scheduler_fn=lambda optimizer: lock and LambdaLR(optimizer, lambda epoch: 0.0))
    assert run.options == before
    assert run.strategy.options == before
    assert run.wait(epochs=1, timeout=PATIENCE)


def test_runs_of_different_names_train_side_by_side(make, home, eventually):
    one, other = make("left"), make("right")
    home.add_local_peers(1, other)
    one.start()
    other.start()
    eventually(lambda: len(other.peers()) == 2, PATIENCE)
    assert one.wait(epochs=3, timeout=PATIENCE)
    assert other.wait(epochs=3, timeout=PATIENCE)
    eventually(lambda: len(one.peers()) == 1, PATIENCE)
    assert {one.status.state, other.status.state} == {RunState.TRAINING}
    home.remove_local_peers(run=one)
    assert len(home.local_peers) == 1
    home.remove_local_peers(run=other)
    assert home.local_peers == ()


def test_two_runs_never_share_a_model(make):
    first = make("first")
    first.start()
    assert first.wait(steps=2, timeout=PATIENCE)
    second = make("second", first.model)
    with pytest.raises(TrainingError, match=r"'first' .* trains this very PacedModel .*copy\.deepcopy"):
        second.start()
    assert second.status.state is RunState.READY
    assert first.wait(steps=5, timeout=PATIENCE)
    second.model = copy.deepcopy(tiny.PacedModel())
    second.start()
    assert second.wait(epochs=1, timeout=PATIENCE)
    assert first.status.state is RunState.TRAINING
