from __future__ import annotations

import os
import threading

import cloudpickle
import lightning
import pytest
import tiny
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from hivenb.errors import LocalPeerError, OptionsError
from hivenb.options import Options
from hivenb.peers.followed_run import Followers
from hivenb.peers.peer_recipe import make_recipe

ADDRESSES = ("/ip4/127.0.0.1/tcp/1",)


class Run:
    def __init__(self):
        self.model, self.data, self.options = tiny.TinyModel(), tiny.loader(), Options(target_batch_size=64)
        self.trainer_kwargs, self.followers = {"accelerator": "cpu", "max_epochs": 3, "logger": True}, Followers()


def test_it_holds_what_a_peer_needs_and_not_what_is_the_runs_own():
    run = Run()
    run.data = (tiny.loader(), None)
    recipe = cloudpickle.loads(make_recipe(run, ADDRESSES, seed=7))
    assert (recipe.initial_peers, recipe.seed, recipe.options) == (ADDRESSES, 7, run.options)
    assert recipe.trainer_kwargs == {"accelerator": "cpu", "max_epochs": 3}
    assert len(recipe.data) == len(run.data[0])
    for mine, packed in zip(run.model.parameters(), recipe.model.parameters(), strict=True):
        assert packed.equal(mine)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"max_steps": 60, "min_steps": 4, "limit_train_batches": 8}, {"max_steps": 60, "limit_train_batches": 8}),
        ({"max_epochs": None, "max_time": "00:00:01:00"}, {"max_epochs": -1}),
        ({"max_epochs": 4, "max_time": "00:00:01:00"}, {"max_epochs": 4}),
        ({"accumulate_grad_batches": 2, "callbacks": [], "logger": True}, {"accumulate_grad_batches": 2}),
    ],
)
def test_it_holds_what_a_schedule_may_be_made_of(given, kept):
    run = Run()
    run.trainer_kwargs = given
    assert cloudpickle.loads(make_recipe(run, ADDRESSES, seed=7)).trainer_kwargs == kept


@pytest.mark.parametrize(("given", "has_one"), [(True, True), ([DummyLogger()], True), (False, False), (None, False)])
def test_a_module_finds_a_logger_at_a_peer_if_the_run_has_one(given, has_one):
    run = Run()
    run.trainer_kwargs = {"logger": given, "max_epochs": 3}
    kwargs = cloudpickle.loads(make_recipe(run, ADDRESSES, seed=7)).for_trainer()
    assert (kwargs["max_epochs"], kwargs["limit_val_batches"]) == (3, 0)
    assert ("logger" in kwargs) is has_one
    if has_one:
        kwargs["logger"].experiment.add_scalar("loss", 1.0)
        assert kwargs["logger"].save_dir == kwargs["logger"].log_dir == kwargs["default_root_dir"]
    other = cloudpickle.loads(make_recipe(run, ADDRESSES, seed=8)).for_trainer()
    assert os.listdir(kwargs["default_root_dir"]) == []
    assert other["default_root_dir"] != kwargs["default_root_dir"], "each peer has a folder of its own"


class Data(lightning.LightningDataModule):
    def train_dataloader(self):
        return tiny.loader()


def test_a_data_module_that_a_trainer_of_this_process_uses_can_travel():
    run = Run()
    run.data = Data()
    lightning.Trainer(max_epochs=1, **tiny.QUIET).fit(tiny.TinyModel(), run.data)
    packed = cloudpickle.loads(make_recipe(run, ADDRESSES, seed=1)).data
    assert len(packed.train_dataloader()) == 8
    assert run.data.trainer is not None


@pytest.mark.process
def test_so_can_a_loader_whose_workers_stay():
    run = Run()
    run.data = DataLoader([1.0] * 8, num_workers=1, persistent_workers=True)
    iterator = iter(run.data)
    packed = cloudpickle.loads(make_recipe(run, ADDRESSES, seed=1)).data
    assert len(packed) == 8
    assert run.data._iterator is iterator
    iterator._shutdown_workers()


def test_options_that_cannot_travel_are_named():
    run, lock = Run(), threading.Lock()
    run.options = run.options.replace(scheduler_fn=lambda optimizer: lock)
    with pytest.raises(OptionsError, match=r"scheduler_fn=<function .*TypeError: .*lock.*keep open files"):
        make_recipe(run, ADDRESSES, seed=1)


def test_what_cannot_travel_is_a_clear_error():
    run = Run()
    run.model.lock = threading.Lock()
    with pytest.raises(LocalPeerError, match=r"cannot be sent to another process \(TypeError: .*lock.*keep open files"):
        make_recipe(run, ADDRESSES, seed=1)
    del run.model.lock
    run.data = (batch for batch in [1])
    with pytest.raises(LocalPeerError, match="generator"):
        make_recipe(run, ADDRESSES, seed=1)


def test_loaders_at_work_travel_in_whatever_holds_them():
    run, at_work = Run(), DataLoader([1.0] * 8, num_workers=1, persistent_workers=True)
    at_work._iterator = lock = threading.Lock()
    for data in ([at_work, tiny.loader()], {"a": [at_work]}, CombinedLoader({"a": at_work}, "max_size")):
        for given in (data, (data, None)):
            run.data = given
            recipe = cloudpickle.loads(make_recipe(run, ADDRESSES, seed=1))
            assert type(recipe.data) is type(data)
            assert at_work._iterator is lock
    assert recipe.data._mode == "max_size"
    assert len(recipe.data.iterables["a"]) == 8
