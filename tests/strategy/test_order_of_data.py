"""Each peer goes through the training data in an order of its own, whatever the seed; who opened the swarm, as usual.

Most of it needs no swarm: a Trainer with a strategy that does nothing but that.
"""

from __future__ import annotations

import multiprocessing
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import lightning
import pytest
import torch
from lightning import LightningDataModule, LightningModule
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader
from tiny import QUIET, own_run
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.datapipes.iter import IterableWrapper

import hivenb
from hivenb.strategy import HivemindStrategy
from hivenb.strategy.data_order import OrderOfData, PeerSampler

SAMPLES, BATCH = 48, 4
NUMBERS = TensorDataset(torch.arange(float(SAMPLES)).view(-1, 1))

#: Who opened the swarm, and two who joined.
FOUNDER, FIRST, SECOND = None, "QmFirst", "QmSecond"


class Ordered(SingleDeviceStrategy):
    """What :class:`HivemindStrategy` does with the data, and no swarm."""

    def __init__(self, peer: str | None):
        super().__init__(device="cpu", accelerator=None)
        self.order, self.is_set_up, self.said = OrderOfData(peer, torch.device("cpu")), False, None

    def process_dataloader(self, dataloader: Any) -> Any:
        trainer = self.lightning_module.trainer
        return self.order.of(dataloader, trainer, is_early=not self.is_set_up) if trainer.training else dataloader

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        self.is_set_up = True

    def on_train_start(self) -> None:
        self.said = self.order.begin(self.lightning_module.trainer)

    def teardown(self) -> None:
        self.order.end(self.lightning_module.trainer)
        super().teardown()


class Model(LightningModule):
    """Remembers what it is given, pass by pass."""

    def __init__(self, estimates: bool = False):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.passes: list[list[int]] = []
        self.validated: list[int] = []
        self.draws: list[float] = []
        self.estimates = estimates

    def on_train_epoch_start(self) -> None:
        self.passes.append([])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.passes[-1] += numbers_in(batch)
        self.draws.append(torch.rand(()).item())
        return self.layer(torch.ones(1, 1)).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += numbers_in(batch)

    def configure_optimizers(self) -> Any:
        if self.estimates:
            assert self.trainer.estimated_stepping_batches == self.trainer.max_epochs * SAMPLES // BATCH
        return torch.optim.SGD(self.parameters(), 0.1)


def numbers_in(batch: Any) -> list[int]:
    if isinstance(batch, torch.Tensor):
        return [int(value) for value in batch.flatten()]
    parts = batch.values() if isinstance(batch, dict) else batch
    return [number for part in parts if part is not None for number in numbers_in(part)]


def train(peer: str | None, data: Any, model: Model | None = None, **kwargs: Any) -> Model:
    """What a peer of a script with a seed is given."""
    lightning.seed_everything(42, verbose=False)
    model = model or Model()
    data = data() if callable(data) else data
    fit = {"datamodule": data} if isinstance(data, LightningDataModule) else {"train_dataloaders": data}
    checkpoint = kwargs.pop("ckpt_path", None)
    trainer = lightning.Trainer(strategy=Ordered(peer), **{"max_epochs": 2, **QUIET, **kwargs})
    trainer.fit(model, **fit, ckpt_path=checkpoint)
    return model


def shuffled(**kwargs: Any) -> DataLoader[Any]:
    return DataLoader(NUMBERS, BATCH, shuffle=True, **kwargs)


class Own(DataLoader):
    """One that nobody could make again from its arguments."""

    def __init__(self, count: int):
        self.weird = count
        super().__init__(NUMBERS, count * 2, shuffle=True)


class InModule(Model):
    def train_dataloader(self) -> Any:
        return shuffled()


class Data(LightningDataModule):
    def train_dataloader(self) -> Any:
        return Own(2)


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": shuffled,
    "in sequence": lambda: DataLoader(NUMBERS, BATCH),
    "a generator": lambda: shuffled(generator=torch.Generator().manual_seed(3)),
    "workers": lambda: shuffled(num_workers=1),
    "workers that stay": lambda: shuffled(num_workers=1, persistent_workers=True),
    "no batches": lambda: DataLoader(NUMBERS, None, shuffle=True),
    "the last one dropped": lambda: shuffled(drop_last=True),
    "a subclass": lambda: Own(2),
    "a DataModule": Data,
    "a CombinedLoader": lambda: CombinedLoader({"one": shuffled()}, "min_size"),
    "a list in a dict": lambda: {"one": [shuffled()]},
}

#: Of those that need no processes.
QUICK = [name for name in LOADERS if "workers" not in name]
BY_WORKERS = pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.process)])
ALL = [name if name in QUICK else pytest.param(name, marks=pytest.mark.process) for name in LOADERS]


@pytest.mark.parametrize("name", ALL)
def test_each_peer_sees_everything_in_an_order_of_its_own(name: str) -> None:
    make = LOADERS[name]
    first, second, again = (train(peer, make) for peer in (FIRST, SECOND, FIRST))
    for model in (first, second):
        assert [sorted(numbers) for numbers in model.passes] == [list(range(SAMPLES))] * 2
        assert model.passes[0] != model.passes[1]
    assert first.passes == again.passes
    assert not {tuple(numbers) for numbers in first.passes} & {tuple(numbers) for numbers in second.passes}


@pytest.mark.parametrize("name", ALL)
def test_who_opened_the_swarm_trains_as_without_one(name: str) -> None:
    founder, make = train(FOUNDER, LOADERS[name]), LOADERS[name]
    lightning.seed_everything(42, verbose=False)
    plain, data = Model(), make()
    fit = {"datamodule": data} if isinstance(data, LightningDataModule) else {"train_dataloaders": data}
    lightning.Trainer(max_epochs=2, **QUIET).fit(plain, **fit)
    assert (founder.passes, founder.draws) == (plain.passes, plain.draws)
    assert founder.passes[0] not in train(FIRST, make).passes


def test_data_of_the_module_and_loaded_anew_for_each_pass() -> None:
    first, second = (train(peer, None, InModule(), reload_dataloaders_every_n_epochs=1) for peer in (FIRST, SECOND))
    assert [sorted(numbers) for numbers in first.passes] == [list(range(SAMPLES))] * 2
    assert len({tuple(numbers) for model in (first, second) for numbers in model.passes}) == 4


@BY_WORKERS
@pytest.mark.parametrize("estimates", [False, True])
def test_loaders_that_were_loaded_anew_for_a_pass_go_with_it_and_so_do_their_workers(
    workers: int, estimates: bool
) -> None:
    class Loads(Model):
        def __init__(self) -> None:
            super().__init__(estimates)
            self.made: list[Any] = []
            self.alive: list[int] = []

        def train_dataloader(self) -> Any:
            return shuffled(num_workers=workers, persistent_workers=workers > 0)

        def on_train_epoch_end(self) -> None:
            self.made.append(weakref.ref(self.trainer.train_dataloader))
            self.alive.append(len([one for one in self.made if one() is not None]))
            assert len(started()) == workers

    before = set(multiprocessing.active_children())  # of a swarm that other tests share

    def started() -> set[Any]:
        return set(multiprocessing.active_children()) - before

    model = train(FIRST, None, Loads(), max_epochs=3, reload_dataloaders_every_n_epochs=1)
    assert model.alive == [1, 1, 1]
    assert not started()


def test_a_combined_loader_that_is_given_for_each_pass_anew_has_its_own_loaders_after_training() -> None:
    given = shuffled()
    combined = CombinedLoader({"one": given}, "min_size")

    class Gives(Model):
        def train_dataloader(self) -> Any:
            return combined

    model = train(FIRST, None, Gives(), max_epochs=3, reload_dataloaders_every_n_epochs=1)
    assert len({tuple(numbers) for numbers in model.passes}) == 3
    assert combined.iterables == {"one": given}


def test_loaders_of_one_size_have_orders_of_their_own_unless_their_generators_agree() -> None:
    def pair(*generators: Any) -> Any:
        return [DataLoader(NUMBERS, SAMPLES, shuffle=True, generator=one) for one in generators]

    seen = train(FIRST, pair(None, None), max_epochs=1).passes[0]
    assert seen[:SAMPLES] != seen[SAMPLES:]
    seen = train(FIRST, pair(*(torch.Generator().manual_seed(5) for _ in range(2))), max_epochs=1).passes[0]
    assert seen[:SAMPLES] == seen[SAMPLES:]


def test_a_loader_that_goes_round_within_a_pass_has_another_order_each_time() -> None:
    small = TensorDataset(torch.arange(1000.0, 1004.0).view(-1, 1))
    loaders = {"large": shuffled(), "small": DataLoader(small, BATCH, shuffle=True)}
    (seen,) = train(FIRST, CombinedLoader(loaders, "max_size_cycle"), max_epochs=1).passes
    rounds = [number for number in seen if number >= 1000]
    assert len({tuple(rounds[at : at + 4]) for at in range(0, len(rounds), 4)}) > 3


def test_batches_are_as_many_as_before_and_the_loader_that_was_given_stays() -> None:
    given = DataLoader(NUMBERS, 5, shuffle=True)
    combined = CombinedLoader({"one": given}, "max_size_cycle")
    model = Model()
    trainer = lightning.Trainer(strategy=Ordered(FIRST), max_epochs=1, **QUIET)
    trainer.fit(model, combined)
    assert trainer.num_training_batches == len(given) == 10
    assert combined.iterables == {"one": given}
    assert isinstance(given.sampler, RandomSampler)
    assert trainer.train_dataloader is combined.iterables


def test_a_sampler_of_ones_own_is_left_alone() -> None:
    for sampler in (
        SubsetRandomSampler(range(8)),
        RandomSampler(NUMBERS, replacement=True, num_samples=8),
        RandomSampler(NUMBERS, generator=torch.Generator().manual_seed(1)),
        SequentialSampler(range(8)),
        range(8),
    ):
        trainer, model = lightning.Trainer(strategy=Ordered(FIRST), max_epochs=1, **QUIET), Model()
        seen = []
        model.on_train_start = lambda seen=seen, trainer=trainer: seen.append(trainer.train_dataloader.sampler)
        trainer.fit(model, DataLoader(NUMBERS, BATCH, sampler=sampler))
        assert seen == [sampler]
    batches = BatchSampler(SequentialSampler(NUMBERS), 6, False)

    class Batches(BatchSampler):
        pass

    own = Batches(SequentialSampler(NUMBERS), 6, False)
    assert train(FIRST, DataLoader(NUMBERS, batch_sampler=own), max_epochs=1).passes == [list(range(SAMPLES))]
    assert sorted(train(FIRST, DataLoader(NUMBERS, batch_sampler=batches), max_epochs=1).passes[0]) == list(range(48))


def test_what_draws_from_torchs_numbers_differs_by_peer_too() -> None:
    def weighted() -> Any:
        return DataLoader(NUMBERS, BATCH, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES))

    founder, first, second = (train(peer, weighted) for peer in (FOUNDER, FIRST, SECOND))
    assert founder.passes != first.passes != second.passes != founder.passes
    assert len({model.draws[0] for model in (founder, first, second)}) == 3


def test_models_begin_alike_and_so_does_what_comes_after_training() -> None:
    weights, after, seconds = [], [], []
    for peer in (FOUNDER, FIRST, SECOND):

        class Late(Model):
            def configure_model(self) -> None:
                self.late = torch.nn.Linear(3, 3)

        model = train(peer, shuffled, Late(), max_epochs=0)
        weights.append(model.late.weight.detach().clone())
        train(peer, lambda: DataLoader(NUMBERS, BATCH), max_epochs=1)
        after.append(torch.rand(3) if peer is not FOUNDER else None)  # with no peers in the script, as it was
        seconds.append(None if peer is FOUNDER else torch.nn.Linear(2, 2).weight.detach().clone())
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[1], weights[2])
    assert torch.equal(after[1], after[2])
    assert torch.equal(seconds[1], seconds[2])


def test_a_seed_that_somebody_sets_while_it_trains_stays() -> None:
    class Seeds(Model):
        def on_train_end(self) -> None:
            torch.manual_seed(7)

    train(FIRST, shuffled, Seeds())
    ours = torch.rand(2)
    torch.manual_seed(7)
    assert torch.equal(ours, torch.rand(2))


def test_validation_stays_in_sequence() -> None:
    model = Model()
    trainer = lightning.Trainer(strategy=Ordered(FIRST), max_epochs=1, **{**QUIET, "num_sanity_val_steps": 2})
    trainer.fit(model, shuffled(), DataLoader(NUMBERS, BATCH))
    assert model.validated == [*range(2 * BATCH), *range(SAMPLES)]


@pytest.mark.parametrize("name", ["shuffled", "in sequence"])
def test_it_can_be_switched_off(name: str) -> None:
    first, second = (train(peer, LOADERS[name], use_distributed_sampler=False) for peer in (FIRST, SECOND))
    assert (first.passes, first.draws) == (second.passes, second.draws)


@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_overfitting_keeps_its_few_batches() -> None:
    first, second = (train(peer, shuffled, overfit_batches=2) for peer in (FIRST, SECOND))
    assert first.passes[0] == first.passes[1] != second.passes[0]
    assert len(first.passes[0]) == 2 * BATCH


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
@BY_WORKERS
@pytest.mark.parametrize("estimates", [False, True])
def test_another_start_in_mid_pass_goes_on_in_another_order(tmp_path: Any, workers: int, estimates: bool) -> None:
    def loader() -> Any:
        return shuffled(num_workers=workers)

    class Stops(Model):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 4 and self.current_epoch == 0:
                self.trainer.save_checkpoint(tmp_path / "resume.ckpt")

    (began, _) = train(FIRST, loader, Stops()).passes
    resumed = Model(estimates)
    resumed.passes.append([])  # it begins in the middle of one
    train(FIRST, loader, resumed, ckpt_path=tmp_path / "resume.ckpt")
    assert [len(numbers) for numbers in resumed.passes] == [SAMPLES - 5 * BATCH, SAMPLES]
    assert resumed.passes[0][:BATCH] not in (began[:BATCH], began[5 * BATCH : 6 * BATCH])


@BY_WORKERS
def test_what_is_asked_before_training_changes_nothing(workers: int) -> None:
    """Lightning reads the data for ``estimated_stepping_batches``, and workers begin."""
    first, second = (train(peer, lambda: shuffled(num_workers=workers), Model(True)) for peer in (FIRST, SECOND))
    assert [sorted(numbers) for numbers in first.passes] == [list(range(SAMPLES))] * 2
    assert first.passes != second.passes
    sampled = [
        train(
            peer,
            lambda: DataLoader(
                NUMBERS, BATCH, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES), num_workers=workers
            ),
            Model(True),
            max_epochs=1,
        ).passes
        for peer in (FIRST, SECOND)
    ]
    assert sampled[0] != sampled[1]


def test_a_peers_loader_can_be_packed_and_given_to_another_peer() -> None:
    held = []

    class Holds(Model):
        def on_train_start(self) -> None:
            held.append(self.trainer.train_dataloader)

    first = train(FIRST, shuffled, Holds())
    copied = pickle.loads(pickle.dumps(held[0]))
    assert isinstance(copied.sampler, PeerSampler)
    assert not {tuple(one) for one in train(SECOND, copied).passes} & {tuple(one) for one in first.passes}


# -- streams ----------------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([float(number)]) for number in range(SAMPLES))


class Batches:
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.zeros(2, 1)] * 3)


class SeededStream(IterableDataset):
    """Draws its order as the remark says that one should."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        seed = torch.randint(2**40, ()).item() if worker is None else worker.seed
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(seed))
        return (torch.tensor([float(number)]) for number in order)


def said_of(data: Any, peer: str | None = FIRST) -> str | None:
    trainer = lightning.Trainer(strategy=Ordered(peer), max_epochs=1, **QUIET)
    trainer.fit(Model(), data)
    return trainer.strategy.said


@pytest.mark.parametrize("peer", [FOUNDER, FIRST])
@pytest.mark.parametrize(
    ("data", "what"),
    [
        (lambda: DataLoader(Stream(), BATCH), "a stream, Stream"),
        (lambda: Batches(), "of type Batches"),
        (lambda: DataLoader(NUMBERS, BATCH, sampler=range(8)), "a sampler of yours, range"),
        (
            lambda: DataLoader(NUMBERS, BATCH, sampler=RandomSampler(NUMBERS, generator=torch.Generator())),
            "a sampler of yours, RandomSampler",
        ),
        (lambda: CombinedLoader([shuffled(), DataLoader(Stream(), BATCH)], "min_size"), "a stream, Stream"),
    ],
)
def test_what_may_be_the_same_at_each_peer_is_said_once(peer: str | None, data: Any, what: str) -> None:
    given = data()
    said = said_of({"one": given, "again": given} if isinstance(given, Batches) else given, peer)
    assert said is not None
    assert said.count("comes in an order of its own") == 1
    assert what in said


@pytest.mark.parametrize("name", [*QUICK, "weighted"])
def test_nothing_is_said_of_data_that_differs(name: str) -> None:
    weighted = DataLoader(NUMBERS, BATCH, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES))
    given = weighted if name == "weighted" else LOADERS[name]()
    if not isinstance(given, LightningDataModule):
        assert said_of(given) is None


@BY_WORKERS
def test_a_stream_can_draw_an_order_that_differs_by_peer(workers: int) -> None:
    first, second = (train(peer, DataLoader(SeededStream(), BATCH, num_workers=workers)) for peer in (FIRST, SECOND))
    assert [sorted(numbers) for numbers in first.passes] == [list(range(SAMPLES))] * 2
    assert len({tuple(numbers) for model in (first, second) for numbers in model.passes}) == 4


@pytest.mark.filterwarnings("ignore")
def test_a_shuffled_pipe_differs_by_peer() -> None:
    def pipe() -> Any:
        return DataLoader(IterableWrapper([torch.tensor([float(one)]) for one in range(SAMPLES)]).shuffle(), BATCH)

    first, second = (train(peer, pipe) for peer in (FIRST, SECOND))
    assert sorted(first.passes[0]) == list(range(SAMPLES))
    assert first.passes[0] != second.passes[0]
    assert said_of(pipe()) is None


def rows(parts: list[int]) -> Iterator[dict[str, int]]:
    for part in parts:
        for number in range(part * 12, part * 12 + 12):
            yield {"number": number}


def in_shards(count: int = 4) -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.IterableDataset.from_generator(rows, gen_kwargs={"parts": list(range(count))})


STREAMS: dict[str, Callable[[], Any]] = {
    "shards": in_shards,
    "shards, shuffled": lambda: in_shards().shuffle(seed=42, buffer_size=8),
    "one shard": lambda: in_shards().shuffle(seed=42, buffer_size=8).take(SAMPLES),
    "one shard, in sequence": lambda: in_shards().take(SAMPLES),
    "mapped": lambda: in_shards().shuffle(seed=1).map(lambda row: {"number": row["number"]}),
}


@BY_WORKERS
@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_of_datasets_is_read_in_an_order_of_the_peer(name: str, workers: int) -> None:
    stream = STREAMS[name]()
    kwargs = {"num_workers": workers, "persistent_workers": workers > 0}
    founder, first, second, again = (
        train(peer, lambda: DataLoader(stream, BATCH, **kwargs)) for peer in (FOUNDER, FIRST, SECOND, FOUNDER)
    )
    for model in (first, second):
        assert [sorted(numbers) for numbers in model.passes] == [list(range(SAMPLES))] * 2
    assert len({tuple(numbers) for model in (first, second) for numbers in model.passes}) == 4
    assert founder.passes == again.passes != first.passes
    assert founder.passes[0] == founder.passes[1]
    assert stream.epoch == 0
    said = said_of(DataLoader(stream, BATCH))
    assert (said is not None and "one shard" in said) is name.startswith("one shard")


def test_a_stream_that_is_split_by_hand_is_left_alone() -> None:
    split = pytest.importorskip("datasets.distributed").split_dataset_by_node(in_shards(), rank=1, world_size=2)
    assert train(FIRST, DataLoader(split, BATCH)).passes == train(FOUNDER, DataLoader(split, BATCH)).passes
    assert said_of(DataLoader(split, BATCH)) is None


# -- in a swarm -------------------------------------------------------------------------------------------------------


@pytest.mark.process
def test_scripts_with_one_seed_compute_other_batches(swarm: hivenb.Swarm) -> None:
    """Of who opened the swarm, as without one; of those who join, others each."""
    seen, own = {}, own_run()
    for name in ("founder", "first", "second"):
        joined = swarm if name == "founder" else hivenb.Swarm.join(swarm.invite, name=name)
        lightning.seed_everything(42, verbose=False)
        model = Model()
        strategy = HivemindStrategy(16, matchmaking_time=0.5, dht=joined.dht, **own)
        notices: list[str] = []
        strategy.on_notice = notices.append
        weights = model.layer.weight.detach().clone()
        data = {"one": shuffled(), "other": DataLoader(Stream(), BATCH)}
        trainer = lightning.Trainer(strategy=strategy, max_epochs=1, limit_train_batches=6, **QUIET)
        trainer.fit(model, data, DataLoader(NUMBERS, BATCH))
        seen[name] = (weights, model.passes[0], model.validated)
        assert notices == ["the order of the data may be the same at each peer"]
        assert trainer.train_dataloader["one"] is data["one"]
        if joined is not swarm:
            joined.close()
    lightning.seed_everything(42, verbose=False)
    plain = Model()
    lightning.Trainer(max_epochs=1, limit_train_batches=6, **QUIET).fit(
        plain, {"one": shuffled(), "other": DataLoader(Stream(), BATCH)}
    )
    assert seen["founder"][1] == plain.passes[0]
    assert len({tuple(passed) for _, passed, _ in seen.values()}) == 3
    for weights, _, validated in seen.values():
        assert torch.equal(weights, seen["founder"][0])
        assert validated == list(range(SAMPLES))
