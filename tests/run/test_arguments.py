"""What beginners give to a run, and what they are told."""

from __future__ import annotations

import copy
import gc
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import tiny
import torch
from lightning.pytorch.utilities import CombinedLoader

import hivenb
from hivenb.errors import LocalPeerError, OptionsError, SwarmError, TrainingError
from hivenb.options.options import Options
from hivenb.run.concurrent_runs import before, claim_place
from hivenb.run.fit import check_arguments, split_data
from hivenb.run.status import RunState
from hivenb.swarm.run_names import RunNames, Runs
from hivenb.swarm.start import RunningDHT, Settings
from hivenb.system.logs import collect_logs

OPTIONS = Options(target_batch_size=8)


def closed_swarm(name: str = "gone") -> Any:
    """A swarm of which only is left what runs are made with."""
    swarm: Any = object.__new__(hivenb.Swarm)
    swarm.name, swarm._settings, swarm._running = name, Settings(), SimpleNamespace(unless_closed=None)
    swarm.run_names, swarm.runs, swarm.logs = RunNames(), Runs("gone"), collect_logs()
    return swarm


def run_in(swarm: Any, **kwargs: Any) -> hivenb.TrainingRun:
    return hivenb.TrainingRun(
        tiny.TinyModel(), tiny.loader(), swarm=swarm, options=OPTIONS, keep_history=False, **kwargs
    )


@pytest.mark.parametrize(
    ("swarm", "said"),
    [
        (hivenb.Swarm, r"swarm=hivenb\.Swarm\(\)"),
        ("hivenb://abc", r"swarm=hivenb\.Swarm\.join\(\.\.\.\)"),
        (None, r"swarm=None is no swarm"),
        (SimpleNamespace(dht=None), "is no swarm"),
    ],
)
def test_what_is_no_swarm_is_refused_with_what_to_write(swarm, said) -> None:
    with pytest.raises(TrainingError, match=said):
        hivenb.TrainingRun(tiny.TinyModel(), tiny.loader(), swarm=swarm, options=OPTIONS)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (tiny.TinyModel, r"the class TinyModel; give one of its instances: TinyModel\("),
        (torch.nn.Linear(1, 1), "has to be a LightningModule.* is a Linear"),
        ("model", "has to be a LightningModule.* is a str"),
    ],
)
def test_what_is_no_lightning_module_is_refused(model, said) -> None:
    with pytest.raises(TrainingError, match=said):
        check_arguments(model, None, OPTIONS, {})


def test_options_of_another_kind_are_refused_with_what_to_write() -> None:
    swarm = object.__new__(hivenb.Swarm)
    with pytest.raises(OptionsError, match=r"hivenb\.Options\(target_batch_size=\.\.\.\)"):
        check_arguments(tiny.TinyModel(), swarm, {"target_batch_size": 32}, {})


def test_a_run_whose_swarm_is_closed_says_that_it_stays_there() -> None:
    run, other = run_in(closed_swarm()), closed_swarm("new")
    advice = r"make another run with hivenb\.TrainingRun\(run\.model, .*swarm=swarm\): the model has its weights"
    with pytest.raises(
        SwarmError, match=rf"belongs to a swarm 'gone' that is closed.*hivenb\.Swarm\('gone'\), and {advice}"
    ):
        run.start()
    assert run.status.state is RunState.READY
    other._running = RunningDHT("new", SimpleNamespace(is_usable=True))
    with pytest.raises(LocalPeerError, match=rf"belongs to a swarm 'gone' that is closed; {advice}"):
        other.add_local_peers(1, run)
    run.swarm._running = other._running
    with pytest.raises(LocalPeerError, match=rf"another swarm, 'new'; add them there, .*, or {advice}"):
        run.swarm.add_local_peers(1, run_in(other))


@pytest.mark.parametrize("is_gone", [True, False])
def test_the_newest_run_is_resumed_be_it_held_or_not(is_gone) -> None:
    swarm = closed_swarm()
    runs = [run_in(swarm) for _ in range(2)]
    for started_at, run in enumerate(runs):
        trainer = lightning.Trainer(**tiny.QUIET, max_steps=1 + started_at)
        trainer.fit(copy.deepcopy(run.model), tiny.loader())
        run.kept_folder.keep_state(trainer)
        run._started_at = float(started_at)
        claim_place(run)
    new = run_in(swarm, resume=True)
    if is_gone:
        del run, runs[1]
        gc.collect()
    new._go_on_from(before(new))  # as the first start does
    assert torch.load(new.kept_folder.checkpoint, weights_only=False)["global_step"] == 2
    assert new.status.epoch == 1, "a file of a Trainer without a swarm has none"


@pytest.mark.parametrize("given", [{"target_batch_size": 16}, "float16"])
def test_changes_that_are_given_as_options_are_refused_with_what_to_write(given) -> None:
    run = run_in(closed_swarm())
    with pytest.raises(OptionsError, match=r"is no hivenb\.Options\. .*run\.apply\(\*\*changes\)"):
        run.apply(given)
    assert run.options == OPTIONS


@pytest.mark.parametrize("part", [(tiny.loader(),) * 3, (tiny.loader(),), ()])
def test_a_tuple_of_another_number_of_parts_is_refused(part) -> None:
    with pytest.raises(TrainingError, match=rf"tuple of {len(part)} parts; give .* \(training, validation\). Several"):
        split_data(part)


def test_a_tuple_is_a_pair_and_all_else_is_what_a_trainer_trains_on() -> None:
    one, other = tiny.loader(), tiny.loader()
    combined = CombinedLoader({"a": one, "b": other}, "max_size")
    for train in ([one], [one, other], [one, [other]], {"a": one, "b": (other,)}, combined, one):
        assert split_data(train) == (train, None)
        assert split_data((train, [other])) == (train, [other])


def test_a_model_can_bring_its_data() -> None:
    class Brings(tiny.TinyModel):
        def train_dataloader(self):
            return tiny.loader()

    assert split_data(None, Brings()) == (None, None)
    with pytest.raises(TrainingError, match="data is None; give a DataLoader"):
        split_data(None, tiny.TinyModel())


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size", "sequential"])
def test_data_without_batches_is_refused_whatever_holds_it(mode) -> None:
    full, empty = tiny.loader(), tiny.loader(4, 8)
    empty = torch.utils.data.DataLoader(empty.dataset, 8, drop_last=True)
    if mode == "sequential":
        with pytest.raises(TrainingError, match="sequential"):
            split_data(CombinedLoader([full], mode))
        return
    for nothing in (CombinedLoader([empty, empty], mode), [empty], {}, [full, empty], empty):
        with pytest.raises(TrainingError, match="has no batches"):
            split_data(nothing)
    half = CombinedLoader([full, empty], mode)
    if mode == "max_size":
        assert split_data(half) == (half, None)
    else:
        with pytest.raises(TrainingError, match="has no batches"):
            split_data(half)
    with pytest.raises(TrainingError, match="gives single samples"):
        split_data({"a": full, "b": full.dataset})


@pytest.mark.parametrize("pair", [False, True])
def test_a_bare_dataset_is_refused_as_it_has_no_batches(pair) -> None:
    dataset = tiny.loader().dataset
    data = (tiny.loader(), dataset) if pair else dataset
    with pytest.raises(TrainingError, match=r"TensorDataset gives single samples.*DataLoader\(dataset, batch_size"):
        split_data(data)


def test_streams_and_iterables_of_batches_are_data() -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(tiny.loader())

    for data in (Stream(), iter(tiny.loader())):
        assert split_data(data) == (data, None)
