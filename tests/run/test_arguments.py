"""What beginners give to a run, and what they are told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tiny
import torch

import hivenb
from hivenb.errors import OptionsError, TrainingError
from hivenb.options.options import Options
from hivenb.run.arguments import check_arguments
from hivenb.run.data import split_data

OPTIONS = Options(target_batch_size=8)


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


@pytest.mark.parametrize("part", [(tiny.loader(),) * 3, [tiny.loader()], ()])
def test_data_of_another_number_of_parts_is_refused(part) -> None:
    with pytest.raises(TrainingError, match=rf"data has {len(part)} parts; give .* \(training, validation\)"):
        split_data(part)


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
