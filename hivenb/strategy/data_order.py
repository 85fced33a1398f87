"""The order in which a peer goes through its training data: another one at each peer, whatever the seed of a script.

Ranks of ``ddp`` share the data out by their number. Peers have none, they come and go: who opens a swarm keeps the
order of its script, and each that joins goes through all of the data in an order that follows from its id.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import os
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    IterDataPipe,
    MapDataPipe,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from torch.utils.data.datapipes.iter import Shuffler
from torch.utils.data.graph_settings import get_all_graph_pipes

#: What a peer's order of the data cannot be made of, and what to do about it.
SAME_EVERYWHERE = (
    "the training data ({what}) comes in an order of its own, which stays as it is. Where that is the same at each "
    "peer, all of them compute the same batches, and further peers add nothing. {remedy}"
)

#: What is said of a stream of ``datasets`` that is in one piece.
ONE_SHARD = (
    "the training data, a stream of datasets, is in one shard, or kept in order by take() or skip(): all peers read it "
    "from the same place on, each in an order of its own, and so they share many samples. Give it several shards, as "
    "by to_iterable_dataset(num_shards=64) or reshard(), or split it yourself by "
    "datasets.distributed.split_dataset_by_node"
)

#: Samples among which a peer shuffles a stream of ``datasets`` that has no buffer for it.
STREAM_BUFFER = 128

_OF_A_STREAM = (
    "Draw the order in __iter__ from torch's random numbers, which differ by peer, in a worker from those of "
    "torch.utils.data.get_worker_info().seed; or let each peer read files of its own"
)
_OF_A_SAMPLER = (
    "Leave it out for DataLoader(..., shuffle=True), or let it draw from torch's global random numbers, which differ "
    "by peer, instead of a generator with a seed"
)
_OF_AN_ITERABLE = "Give a DataLoader with shuffle=True, or let each peer have data of its own"

#: Samplers that draw from torch's global random numbers unless they have a generator.
_TORCH_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class PeerSampler(Sampler[int]):
    """All of a dataset, in an order that follows from a seed, another one at each pass.

    :param dataset: with a length
    :param seed: of the orders
    :param is_fixed: whether the order is the same at each pass
    """

    def __init__(self, dataset: Sized, seed: int, is_fixed: bool = False):
        self.dataset, self.seed, self.is_fixed = dataset, seed, is_fixed
        self._passes = 0

    def begin(self, seed: int) -> None:
        """Begin anew with the orders of another seed."""
        self.seed, self._passes = seed, 0

    def __iter__(self) -> Iterator[int]:
        # a generator, so that what makes an iterator twice for one pass, as workers do, takes one order
        if not self.is_fixed:
            self._passes += 1
        generator = torch.Generator().manual_seed(number_of(self.seed, self._passes))
        yield from torch.randperm(len(self.dataset), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.dataset)


class PeerStreamSampler(Sampler[None]):
    """The sampler that a DataLoader of a stream has, which knows no indices; it lets each pass be shuffled anew.

    :param stream: of ``datasets``
    :param seed: of the orders
    :param epoch: pass through the data to begin with
    """

    def __init__(self, stream: Any, seed: int, epoch: int):
        self.stream, self.seed = stream, seed
        self.set_epoch(epoch)

    def begin(self, seed: int, epoch: int) -> None:
        """Begin anew with the orders of another seed."""
        self.seed = seed
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning before each pass."""
        self.stream.set_epoch(number_of(self.seed, epoch))

    def __iter__(self) -> Iterator[None]:
        while True:
            yield None


class OrderOfData:
    """What one ``fit`` does with the order of its training data, and with torch's random numbers.

    :param peer: that goes through the data in an order of its own; ``None`` for who keeps the order of the script
    :param device: that trains
    """

    def __init__(self, peer: str | None, device: torch.device):
        self._peer, self._device = peer, device
        # By the id of what stands for it: that, and what was given. Of data that is loaded anew for each pass, the last
        # is kept alone; all before goes, and its workers with it.
        self._given: dict[int, tuple[weakref.ref[DataLoader[Any]], DataLoader[Any]]] = {}
        self._count: Counter[int] = Counter()
        self._was_early = False
        self._early: list[tuple[DataLoader[Any], tuple[Any, ...]]] = []
        self._remarks: list[str] = []
        #: torch's random numbers to go on with after training, and the seed of those that it has
        self._random: tuple[list[torch.Tensor], int] | None = None

    def of(self, loader: Any, trainer: Any, *, is_early: bool) -> Any:
        """What this peer trains with in place of some of its data: the same batches' worth, in the peer's order.

        :param loader: as it was given; it stays as it is
        :param trainer: Lightning's
        :param is_early: whether that is before a checkpoint was looked at, as for ``estimated_stepping_batches``
        """
        if not trainer._accelerator_connector.use_distributed_sampler:
            return loader
        if is_early:
            self._was_early = True
        else:
            self._take_random_numbers()
        remark = what_stays(loader)
        if remark is not None and remark not in self._remarks:
            self._remarks.append(remark)
        if self._peer is None or not isinstance(loader, DataLoader) or has_sampler_of_its_own(loader):
            return loader
        given = loader.generator
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if given is None else given.initial_seed()
        key = (self._peer, seed, self._count[id(given)])
        self._count[id(given)] += 1
        made = in_own_order(loader, key, trainer)
        if is_early:
            self._early.append((made, key))
        self._note(made, loader)
        return made

    def _note(self, made: DataLoader[Any], given: DataLoader[Any]) -> None:
        # a CombinedLoader that is given for each pass anew has what stood for it in the last one
        if (known := self._given.get(id(given))) is not None:
            given = known[1]
        number, all_given = id(made), self._given
        self._given[number] = weakref.ref(made, lambda _: all_given.pop(number, None)), given

    def _take_random_numbers(self) -> None:
        """Go on with random numbers of this peer's own: no more weights are made, unless that was done already."""
        if self._peer is None or self._random is not None:
            return
        device = self._device
        seed = number_of(self._peer, int(torch.randint(2**62, ()).item()))
        states = [torch.get_rng_state()]
        if device.type == "cuda":
            states.append(torch.cuda.get_rng_state(device))
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        torch.default_generator.manual_seed(seed)
        self._random = states, seed

    def begin(self, trainer: Any) -> str | None:
        """Training begins.

        :returns: what whoever trains should know of the order of the data, if there is something
        """
        if self._was_early and self._peer is not None:
            self._take_random_numbers()
            for loader, key in self._early:
                _begin_at(loader, key, trainer)
            self._early.clear()
            if all(isinstance(one, DataLoader) for one in trainer.fit_loop._combined_loader.flattened):
                iter(trainer.fit_loop._data_fetcher)  # workers have begun with what was known then
        said, self._remarks = self._remarks, []
        return " ".join(said) or None

    def end(self, trainer: Any) -> None:
        """Give back what was given: the data to its CombinedLoader, and random numbers as all peers have them."""
        combined = trainer.fit_loop._combined_loader
        if combined is not None and self._given:
            for made in [reference() for reference, _ in self._given.values()]:
                if made is not None:
                    _end_workers(made)
            known = {number: given for number, (_, given) in self._given.items()}
            combined.flattened = [known.get(id(one), one) for one in combined.flattened]
        self._given.clear()
        if self._random is None:
            return
        (states, seed), self._random = self._random, None
        if torch.initial_seed() != seed:
            return  # somebody has chosen others meanwhile
        torch.set_rng_state(states[0])
        if len(states) > 1:
            torch.cuda.set_rng_state(states[1], self._device)


def number_of(*parts: object) -> int:
    """A number below 2**62 that follows from some values, and is another one for others."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 2


def has_sampler_of_its_own(loader: DataLoader[Any]) -> bool:
    """Whether a person has said in which order a loader takes samples, other than by ``shuffle=``."""
    if isinstance(loader.dataset, IterableDataset):
        return False
    sampler = loader.sampler
    if type(loader.batch_sampler) is not (type(None) if loader.batch_size is None else BatchSampler):
        return True
    if isinstance(sampler, PeerSampler):
        return False
    of_all = getattr(sampler, "data_source", None) is loader.dataset or isinstance(loader.dataset, MapDataPipe)
    if type(sampler) is RandomSampler:
        is_plain = not sampler.replacement and sampler.num_samples == len(sampler.data_source)
        return not (of_all and is_plain and sampler.generator is loader.generator)
    return type(sampler) is not SequentialSampler or not of_all


def what_stays(loader: Any) -> str | None:
    """What is to be said of data that each peer takes in the order in which it comes; ``None`` if it does not."""
    if not isinstance(loader, DataLoader):
        return SAME_EVERYWHERE.format(what=f"of type {type(loader).__name__}", remedy=_OF_AN_ITERABLE)
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset):
        if is_datasets_stream(dataset):
            return ONE_SHARD if not is_split(dataset) and has_one_shard(dataset) else None
        remedy = None if _is_shuffled_pipe(dataset) else _OF_A_STREAM
        what = f"a stream, {type(dataset).__name__}"
    else:
        remedy = _OF_A_SAMPLER if has_sampler_of_its_own(loader) and not _differs_by_itself(loader) else None
        one = loader.sampler if type(loader.batch_sampler) in (BatchSampler, type(None)) else loader.batch_sampler
        what = f"by a sampler of yours, {type(one).__name__}"
    return None if remedy is None else SAME_EVERYWHERE.format(what=what, remedy=remedy)


def in_own_order(loader: DataLoader[Any], key: tuple[Any, ...], trainer: Any) -> DataLoader[Any]:
    """A copy of a loader that goes through the same dataset in an order of its own.

    Not made by the loader's class, as Lightning does it: a copy needs no arguments, so that any subclass will do.

    :param loader: without a sampler of its own
    :param key: from which the order follows
    :param trainer: Lightning's
    """
    made: DataLoader[Any] = copy.copy(loader)
    own: dict[str, Any] = {"_iterator": None, "generator": torch.Generator()}
    dataset = loader.dataset
    sampler: Any = None
    if not isinstance(dataset, IterableDataset):
        sampler = PeerSampler(dataset, 0, is_fixed=trainer.overfit_batches > 0)  # type: ignore[arg-type]
    elif is_datasets_stream(dataset) and not is_split(dataset):
        own["dataset"] = copied_stream(dataset)
        sampler = PeerStreamSampler(own["dataset"], 0, 0)
    if sampler is not None:
        own["sampler"] = sampler
        if loader.batch_size is not None:
            own["batch_sampler"] = BatchSampler(sampler, loader.batch_size, loader.drop_last)
    vars(made).update(own)  # a DataLoader lets nobody set them
    _begin_at(made, key, trainer)
    return made


def _begin_at(made: DataLoader[Any], key: tuple[Any, ...], trainer: Any) -> None:
    """Let a loader have the orders from a moment of training on: another start has others."""
    seed = number_of(*key, trainer.global_step)
    made.generator.manual_seed(number_of(seed, "workers"))
    if isinstance(made.sampler, PeerSampler):
        made.sampler.begin(seed)
    elif isinstance(made.sampler, PeerStreamSampler):
        made.sampler.begin(seed, trainer.fit_loop.epoch_progress.current.processed)


def _end_workers(loader: DataLoader[Any]) -> None:
    """End those of ``persistent_workers=True``, as Lightning does with loaders that it knows."""
    if isinstance(loader._iterator, _MultiProcessingDataLoaderIter):
        loader._iterator._shutdown_workers()
    loader._iterator = None


def _differs_by_itself(loader: DataLoader[Any]) -> bool:
    """Whether a sampler that somebody has chosen is one for several peers, or draws from this peer's own numbers."""
    if type(loader.batch_sampler) not in (BatchSampler, type(None)):
        return False
    sampler = loader.sampler
    return isinstance(sampler, DistributedSampler) or (
        isinstance(sampler, _TORCH_SAMPLERS) and getattr(sampler, "generator", None) is None
    )


def _is_shuffled_pipe(dataset: Any) -> bool:
    """Whether a pipe of torch's is shuffled, for which it takes the loader's generator."""
    if not isinstance(dataset, IterDataPipe):
        return False
    graph = torch.utils.data.graph.traverse_dps(dataset)
    return any(isinstance(pipe, Shuffler) for pipe in get_all_graph_pipes(graph))


def is_datasets_stream(dataset: Any) -> bool:
    """Whether this is a stream of ``datasets``, which is not imported for it."""
    module = sys.modules.get("datasets")
    return module is not None and isinstance(dataset, module.IterableDataset)


def is_split(stream: Any) -> bool:
    """Whether somebody has split a stream of ``datasets`` already, or wants it to go on from where it was."""
    return stream._distributed is not None or getattr(stream, "_starting_state_dict", None) is not None


def has_one_shard(stream: Any) -> bool:
    """Whether all peers read a stream of ``datasets`` from the same place on: it is in one piece, or kept in order."""
    parts = _parts_of(stream._ex_iterable)
    is_fixed = any(getattr(part, "block_sources_order_when_shuffling", False) for part in parts)  # by take() or skip()
    return stream.num_shards < 2 or is_fixed


def _parts_of(iterable: Any) -> Iterator[Any]:
    yield iterable
    for part in (getattr(iterable, "ex_iterable", None), *getattr(iterable, "ex_iterables", ())):
        if part is not None:
            yield from _parts_of(part)


def copied_stream(stream: Any) -> Any:
    """The same stream of ``datasets``, with an epoch of its own, which another one puts into another order."""
    from datasets.distributed import split_dataset_by_node

    if not any(type(part).__name__.startswith("BufferShuffled") for part in _parts_of(stream._ex_iterable)):
        kwargs: dict[str, Any] = {"seed": 0, "buffer_size": STREAM_BUFFER}
        if "max_buffer_input_shards" in inspect.signature(stream.shuffle).parameters:
            kwargs["max_buffer_input_shards"] = 1  # the front of all of them would be what other peers read, too
        stream = stream.shuffle(**kwargs)
    return split_dataset_by_node(stream, rank=0, world_size=1)
