"""Two runs in one process: of one name, of one model, side by side."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import tiny
import torch
from torch.optim.lr_scheduler import LambdaLR

import hivenb
from hivenb.errors import OptionsError, TrainingError
from hivenb.options import Options
from hivenb.peers.followed_run import pack_options
from hivenb.run.status import RunState
from hivenb.training import TrainingRun

#: Seconds that anything may take; the machine may be busy.
PATIENCE = 60.0


@pytest.fixture(scope="module")
def home():
    with hivenb.Swarm("succession") as swarm:
        yield swarm


#: An epoch of a run that is alone is this short: it has nobody to meet.
ALONE = {"target": 128}


@pytest.fixture
def make(home):
    runs: list[TrainingRun] = []

    def make_run(name: str, model=None, target: int = 512, **kwargs) -> TrainingRun:
        # epochs of about a second: each costs all peers two rounds
        options = Options(target_batch_size=target, run_id=name, matchmaking_time=2.0)
        model = tiny.in_large_batches(tiny.PacedModel() if model is None else model)
        runs.append(TrainingRun(model, tiny.large_batches(), swarm=home, options=options, accelerator="cpu", **kwargs))
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


@pytest.mark.parametrize(
    ("same_model", "name"), [(False, "again"), (True, "same")], ids=["cells run again", "one cell run again"]
)
def test_a_new_run_of_a_name_takes_the_place_of_the_old_one(make, same_model, name):
    old = make(name, **ALONE)
    old.start()
    assert old.wait(epochs=2, timeout=PATIENCE)
    new = make(name, old.model if same_model else None, **ALONE)
    as_what = "" if same_model else " as 'again-2', a new run that begins with the weights of its own PacedModel"
    new.start()
    assert new.wait(epochs=2, timeout=PATIENCE)
    assert (old.status.state, old.status.error) == (RunState.STOPPED, None)
    assert "replaced by a newer one" in marks(old)
    assert "took the place of an older one" in marks(new)
    assert (new.options.run_id, new.experiment) == (name if same_model else "again-2", name)
    assert ("new run again-2" in marks(new)) is not same_model
    assert new.status.state is RunState.TRAINING
    assert [line for line in new.log_lines if f"'{name}' stops, and a newer one takes its place{as_what}." in line]
    old.start()  # the button of the dashboard that stands further up
    assert old.wait(epochs=1, timeout=PATIENCE)
    assert new.status.state is RunState.STOPPED


@pytest.mark.slow
def test_local_peers_of_a_run_that_has_ended_leave_and_as_many_follow_the_new_one(make, home, eventually):
    old = make("ended")
    home.add_local_peers(1, old)
    old.start()
    eventually(lambda: len(old.peers()) == 2, PATIENCE)
    old.stop(keep_local_peers=True)
    (stayed,) = home.local_peers
    assert stayed.state == "training"
    old = None  # nobody knows it any more
    make.runs.clear()
    gc.collect()
    new = make("ended", WiderModel())  # which would not go with theirs
    new.start()
    eventually(lambda: len(new.peers()) == 2 and new.history.snapshot().last("group_size") == 2, PATIENCE)
    assert stayed.state == "left"
    assert len(home.local_peers) == 1
    assert new.status.state is RunState.TRAINING


@pytest.mark.slow
def test_cells_that_are_run_three_times_train_with_one_local_peer_each_time(make, home, eventually):
    """In both orders; the one of the old run leaves."""
    name, runs = "thrice", []
    for kind, starts_first in ((tiny.PacedModel, False), (WiderModel, True), (WiderModel, False)):
        run = make(name, kind())
        runs.append(run)
        if starts_first:
            run.start()
        added = home.add_local_peers(1, run)
        if not starts_first:
            assert run.local_peers == added
            run.start()
        eventually(lambda run=run: len(run.peers()) == 2 and run.history.snapshot().last("group_size") == 2, PATIENCE)
        assert len(run.local_peers) == 1
        eventually(lambda run=run: home.local_peers == run.local_peers, PATIENCE)
        if not starts_first:
            assert run.local_peers == added
    assert [run.local_peers for run in runs[:2]] == [(), ()]
    assert [run.options.run_id for run in runs] == [name, f"{name}-2", f"{name}-3"]
    assert [run.status.state for run in runs] == [RunState.STOPPED, RunState.STOPPED, RunState.TRAINING]
    assert runs[2].apply(Options(target_batch_size=512, run_id=name, matchmaking_time=3.0)).run_id == f"{name}-3"


class Still(tiny.PacedModel):
    """Learns nothing: what is in it came from somewhere else."""

    def __init__(self, weight):
        super().__init__(lr=0.0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(weight)


@pytest.mark.parametrize(
    ("way", "resumes"), [("stopped", True), ("training", True), ("peers kept", True), ("peers kept", False)]
)
@pytest.mark.slow
def test_a_new_model_begins_anew_unless_the_state_of_the_run_is_wanted(make, home, eventually, way, resumes):
    name = f"{way.replace(' ', '-')}-{resumes}"
    count = 1 if way == "stopped" else 2
    size = ALONE if count == 1 else {}
    old = make(name, Still(1.0), **size)
    if count == 2:
        home.add_local_peers(1, old)
    old.start()
    eventually(lambda: len(old.peers()) == count, PATIENCE)
    assert old.wait(epochs=2, timeout=PATIENCE)
    if way != "training":
        old.stop(keep_local_peers=way == "peers kept")
    new = make(name, Still(2.0), resume=resumes, **size)
    new.start()
    eventually(lambda: len(new.peers()) == count and new.history.snapshot().last("group_size") == count, PATIENCE)
    assert new.wait(epochs=1, timeout=PATIENCE)
    assert {float(parameter.mean()) for parameter in new.model.parameters()} == {1.0 if resumes else 2.0}
    assert new.options.run_id == (name if resumes else f"{name}-2")
    if resumes:
        assert new.origin.startswith(("goes on from swarm epoch", "joined at swarm epoch"))
        assert new.status.epoch > 2
    else:
        assert new.origin == "new run"


def test_what_is_to_be_resumed_outlives_the_run_that_has_left_it(make):
    old = make("left", Still(1.0), **ALONE)
    old.start()
    assert old.wait(epochs=2, timeout=PATIENCE)
    old.stop()
    epoch, gone = old.status.epoch, weakref.ref(old)
    new = make("left", Still(2.0), resume=True, **ALONE)
    del old
    make.runs.remove(gone())
    gc.collect()
    assert gone() is None
    new.start()
    assert new.wait(steps=1, timeout=PATIENCE)
    assert {float(parameter.detach().mean()) for parameter in new.model.parameters()} == {1.0}
    assert new.origin == f"goes on from swarm epoch {epoch}"
    assert not any("nothing to resume" in text for text in marks(new))


def test_where_nothing_is_to_be_resumed_the_run_says_so(make):
    run = make("nobody", resume=True, **ALONE)
    run.start()
    assert run.wait(epochs=1, timeout=PATIENCE)
    assert run.origin == "new run: there was nothing to resume"
    assert any(text.startswith("nothing to resume: begins with the weights of its model") for text in marks(run))
    assert any("the run 'nobody' has nothing to resume" in line for line in run.log_lines)
    run.stop()
    run.start()
    assert run.wait(epochs=1, timeout=PATIENCE)
    assert run.origin.startswith("goes on from swarm epoch")


def test_what_does_not_fit_cannot_be_resumed(make):
    old = make("misfit", **ALONE)
    old.start()
    assert old.wait(epochs=1, timeout=PATIENCE)
    old.stop()
    new = make("misfit", WiderModel(), **ALONE, resume=True)
    new.start()
    with pytest.raises(TrainingError, match=r"'misfit' cannot be resumed: more is \(3,\) here and not there in what"):
        new.wait(timeout=PATIENCE)


@pytest.mark.slow
def test_local_peers_stop_with_their_run_and_come_back_with_it(make, home, eventually):
    run = make("stopping")
    (first,) = home.add_local_peers(1, run)
    run.start()
    eventually(lambda: len(run.peers()) == 2, PATIENCE)
    run.stop()
    assert first.state == "left"
    assert (run.local_peers, home.local.to_come_to(run)) == ((), 1)
    run.start()
    eventually(lambda: len(run.peers()) == 2 and len(run.local_peers) == 1, PATIENCE)
    assert home.local.to_come_to(run) == 0
    run.stop()
    home.remove_local_peers(run=run)
    assert home.local.to_come_to(run) == 0
    run.start()
    assert run.wait(epochs=2, timeout=PATIENCE)
    assert home.local_peers == ()


@pytest.mark.slow
def test_local_peers_follow_their_run_to_another_name(make, home, eventually):
    run = make("first-name")
    home.add_local_peers(1, run)
    run.start()
    eventually(lambda: len(run.peers()) == 2, PATIENCE)
    for name, is_kept in (("second-name", True), ("third-name", False)):
        run.stop(keep_local_peers=is_kept)
        run.apply(run_id=name)
        run.start()
        eventually(lambda: len(run.peers()) == 2, PATIENCE)
        eventually(lambda: run.history.snapshot().last("group_size") == 2, PATIENCE)
        (local,) = home.local_peers
        assert (local.state, local.run_id, local.experiment) == ("training", name, name)


class Follower:
    """Hears of options as a local peer does: they are packed."""

    def begin(self, options):
        pack_options(options)


def test_options_that_local_peers_cannot_follow_change_nothing(make):
    run, lock, follower = make("locked", **ALONE), threading.Lock(), Follower()
    run.followers.add(follower)
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
    second = make("second", first.model, **ALONE)
    with pytest.raises(TrainingError, match=r"'first' .* trains this very PacedModel .*copy\.deepcopy"):
        second.start()
    assert second.status.state is RunState.READY
    assert first.wait(steps=5, timeout=PATIENCE)
    second.model = copy.deepcopy(tiny.PacedModel())
    second.start()
    assert second.wait(epochs=1, timeout=PATIENCE)
    assert first.status.state is RunState.TRAINING
