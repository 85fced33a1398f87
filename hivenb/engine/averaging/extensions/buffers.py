"""A module's buffers in the rounds and downloads of an averager of the state, where all who take part have them.

They travel behind all that hivemind's averager sends, and each group decides by what its peers say of themselves: a
peer of plain hivemind neither misses them nor is it disturbed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.compression import CompressionBase, CompressionInfo
from hivemind.utils import get_logger
from torch import nn
from torch.nn.parameter import is_lazy

from hivenb.engine.averaging.averager import AveragerBase
from hivenb.engine.exchange.exact_tensors import ExactKey, SendsExactly
from hivenb.engine.matchmaking.group_records import is_marked

# -- module buffers --------------------------------------------------------------------------------------------------
#
# A module's buffers, such as the statistics of BatchNorm: which of them peers average, and what an average makes of
# them.
#
# Floating-point buffers get the mean of the peers' values, small integer and boolean ones (counts of batches, flags)
# the largest. All others, such as masks and indices, are constants: a peer that joins gets them with the rest. Buffers
# that are not persistent are left alone: a module derives them, or they are nobody else's business.


#: Numbers in an integer buffer that is averaged, at most; a larger one is taken for a constant.
MAX_INTEGERS = 1024

_MEAN, _MEAN_64, _LARGEST, _CONSTANT = "mean", "mean of 64 bits", "largest", "constant"

#: What the kinds that are averaged are exchanged as: 64 bits hold each integer up to 2 ** 53.
_EXCHANGED_AS = {_MEAN: torch.float32, _MEAN_64: torch.float64, _LARGEST: torch.float64}


@dataclass(frozen=True)
class _Place:
    """Where a buffer is: a module may put another tensor there at any time.

    :param name: in the whole module
    :param owner: the part of it that has the buffer
    :param attribute: its name there
    :param shape: when training began
    :param kind: what is made of it
    """

    name: str
    owner: nn.Module
    attribute: str
    shape: torch.Size
    kind: str

    def read(self) -> torch.Tensor | None:
        """The buffer as it is now; ``None`` if it is of another shape by now."""
        buffer = self.owner._buffers.get(self.attribute)
        return buffer.detach() if buffer is not None and buffer.shape == self.shape else None

    def write(self, value: torch.Tensor) -> None:
        buffer = self.read()
        if buffer is None:
            return
        value = value.reshape(self.shape)
        if not buffer.is_floating_point() and value.is_floating_point():
            value = value.round()
        overlaps = any(step == 0 and size > 1 for step, size in zip(buffer.stride(), buffer.shape, strict=True))
        if overlaps or buffer.is_inference():  # cannot be written to
            self.owner._buffers[self.attribute] = value.to(buffer.device, buffer.dtype, copy=True)
        else:
            buffer.copy_(value)


class _Averaged:
    """All buffers of one kind, one after the other in one tensor in shared memory.

    :param places: of these buffers
    :param kind: what is made of them
    """

    def __init__(self, places: Sequence[_Place], kind: str):
        self._places = places
        self._takes_largest = kind == _LARGEST
        self._sizes = [place.shape.numel() for place in places]
        self.key = ExactKey(self._takes_largest)
        self.tensor = torch.zeros(sum(self._sizes), dtype=_EXCHANGED_AS[kind]).share_memory_()
        self.tensor.copy_(self._now())
        self._before = self.tensor.clone()

    def _now(self) -> torch.Tensor:
        """What the module holds, or else what was last known."""
        found = [place.read() for place in self._places]
        values = [
            last if value is None else value.reshape(-1).to(self.tensor.dtype)
            for value, last in zip(found, self.tensor.split(self._sizes), strict=True)
        ]
        if len({value.device for value in values}) > 1:
            values = [value.cpu() for value in values]
        return torch.cat(values).cpu()

    def load(self) -> None:
        now = self._now()
        # what is not finite would spread to all peers: the last value that was goes in its place
        self.tensor.copy_(torch.where(now.isfinite(), now, self.tensor))
        self._before = self.tensor.clone()

    def apply(self) -> list[str]:
        now, average, before = self._now(), self.tensor, self._before
        if self._takes_largest:
            self._write(now, torch.where(average > now, average, now))
            return []
        is_known = average.isfinite()  # not where no peer has had a finite value, as in a mask
        both = (now + (average - before)).clamp(torch.minimum(average, now), torch.maximum(average, now))
        new = torch.where(now == before, average, both)
        new = torch.where(now.isfinite(), new, average)
        mended = is_known & ~now.isfinite()
        self.tensor.copy_(torch.where(is_known, average, before))
        self._write(now, torch.where(is_known, new, now))
        return [place.name for place, one in zip(self._places, mended.split(self._sizes), strict=True) if one.any()]

    def _write(self, now: torch.Tensor, new: torch.Tensor) -> None:
        for place, old, value in zip(self._places, now.split(self._sizes), new.split(self._sizes), strict=True):
            if not torch.equal(old, value):
                place.write(value)


class ModuleBuffers:
    """The persistent buffers of a module, and copies of them in shared memory for peers to average.

    Averaged values are applied so that nothing is lost that batches have added since they were loaded: the difference
    between the average and what was loaded is added, but no further than to the average or to the present value,
    whichever is beyond. A variance stays positive so; where nothing was added, the average is taken as it is.

    To be used by the thread that trains, but for :meth:`state`.

    :param module: on its device
    :param without: tensors among its buffers that are averaged otherwise
    """

    _kept: list[torch.Tensor | None] | None = None

    def __init__(self, module: nn.Module, without: Iterable[torch.Tensor] = ()):
        self._places = tuple(_places(module, {id(one) for one in without}))
        by_kind = {kind: [one for one in self._places if one.kind == kind] for kind in _EXCHANGED_AS}
        self._averaged = [_Averaged(places, kind) for kind, places in by_kind.items() if places]
        described = [(one.kind, tuple(one.shape)) for one in self._places]
        #: equal where peers can average their buffers
        self.fingerprint = hashlib.sha256(repr(described).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._places)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The copies that are averaged in place."""
        return tuple(one.tensor for one in self._averaged)

    @property
    def keys(self) -> tuple[ExactKey, ...]:
        """By which a round knows what to do with each of :attr:`tensors`."""
        return tuple(one.key for one in self._averaged)

    @property
    def are_as_described(self) -> bool:
        """Whether all have the shapes that they had when training began."""
        return all(place.read() is not None for place in self._places)

    @torch.no_grad()
    def load(self) -> None:
        """Copy what the module holds, for a round to average."""
        for one in self._averaged:
            one.load()

    @torch.no_grad()
    def apply(self) -> list[str]:
        """Copy what a round has made of it into the module.

        :returns: names of buffers in which values that were not finite were replaced
        """
        return [name for one in self._averaged for name in one.apply()]

    @torch.no_grad()
    def keep(self) -> None:
        """Copy all buffers as they are now, for :meth:`state`, until :meth:`let_go`: others may write to them."""
        self._kept = [_copy_of(place.read()) for place in self._places]

    def let_go(self) -> None:
        """Forget what :meth:`keep` has copied."""
        self._kept = None

    @torch.no_grad()
    def state(self) -> list[torch.Tensor] | None:
        """All buffers for a peer that joins, as they travel; ``None`` if they are not as described."""
        kept = self._kept
        found = [place.read() for place in self._places] if kept is None else kept
        if any(value is None for value in found):
            return None
        return [value.cpu().to(_sent_as(value.dtype)) for value in found if value is not None]

    @torch.no_grad()
    def load_state(self, state: Sequence[torch.Tensor]) -> bool:
        """Take over what :meth:`state` gave at another peer.

        :returns: whether it fits; if not, nothing is changed
        """
        if [value.shape for value in state] != [place.shape for place in self._places]:
            return False
        for place, value in zip(self._places, state, strict=True):
            place.write(_finite_where_it_was(value, place.read()))
        self.load()
        return True

    @property
    def numbers(self) -> int:
        """How many numbers they hold."""
        return sum(place.shape.numel() for place in self._places)


def _copy_of(value: torch.Tensor | None) -> torch.Tensor | None:
    return None if value is None else value.to("cpu", copy=True)


def _finite_where_it_was(value: torch.Tensor, own: torch.Tensor | None) -> torch.Tensor:
    """What another peer has sent, but for nan and inf, where this one has numbers; masks are the same at all peers."""
    if own is None or not value.is_floating_point() or bool(value.isfinite().all()):
        return value
    own = own.cpu().to(value.dtype)
    return torch.where(value.isfinite() | ~own.isfinite(), value, own)


def averaged_numbers(module: nn.Module) -> tuple[int, int]:
    """How many numbers of its buffers are exchanged with 32 bits, and with 64, in each averaging."""
    sizes = dict.fromkeys(_EXCHANGED_AS, 0)
    for place in _places(module, set()):
        if place.kind in sizes:
            sizes[place.kind] += place.shape.numel()
    return sizes[_MEAN], sizes[_MEAN_64] + sizes[_LARGEST]


def _places(module: nn.Module, seen: set[int]) -> Iterator[_Place]:
    """Where the buffers are that count, each of them once."""
    for prefix, owner in module.named_modules():
        for attribute, buffer in owner._buffers.items():
            if buffer is None or id(buffer) in seen or attribute in owner._non_persistent_buffers_set:
                continue
            if is_lazy(buffer) or buffer.layout != torch.strided or buffer.is_quantized or buffer.is_meta:
                continue
            if buffer.numel():
                seen.add(id(buffer))
                name = f"{prefix}.{attribute}" if prefix else attribute
                yield _Place(name, owner, attribute, buffer.shape, _kind_of(buffer))


def _kind_of(buffer: torch.Tensor) -> str:
    if buffer.is_floating_point():
        return _CONSTANT if buffer.itemsize == 1 else _MEAN_64 if buffer.dtype == torch.float64 else _MEAN
    return _LARGEST if not buffer.is_complex() and buffer.numel() <= MAX_INTEGERS else _CONSTANT


def _sent_as(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


# -- buffer averaging ------------------------------------------------------------------------------------------------


logger = get_logger(__name__)

#: What a peer says to its group before the fingerprint of its buffers, and in the metadata of a download.
_WORD = "module_buffers"


class _Outcome(IntEnum):
    """What a round has made of the buffers."""

    NONE_YET = 0
    AVERAGED = 1
    PLAIN = 2
    WITHOUT = 3
    OTHERS = 4


_WHY_NOT = {
    _Outcome.PLAIN: "a peer of plain hivemind takes part, which has none",
    _Outcome.WITHOUT: "a peer takes part whose model has none, or that has average_buffers=False",
    _Outcome.OTHERS: "a peer takes part whose model has buffers of other shapes",
}


class AveragesBuffers(DecentralizedAverager):
    """Mixin to put *before* hivemind's averager of the state.

    :param module_buffers: that peers average; ``None`` if there are none, or they are not to be averaged
    """

    def __init__(self, *args: Any, module_buffers: ModuleBuffers | None = None, **kwargs: Any):
        self.module_buffers = module_buffers
        self._downloaded_buffers: Sequence[torch.Tensor] | None = None
        self._said: set[str] = set()
        #: that the buffers were left out of a round or a download, and why, in words; ``None`` if they never were
        self.buffers_left_out: str | None = None
        # for both processes
        self._outcome = torch.zeros(1, dtype=torch.int64).share_memory_()
        self._are_offered = torch.ones(1, dtype=torch.bool).share_memory_()
        super().__init__(*args, **kwargs)

    # -- in the process that trains -----------------------------------------------------------------------------

    def step(self, *args: Any, **kwargs: Any) -> Any:
        if self.module_buffers is None:
            return super().step(*args, **kwargs)
        if kwargs.get("averaging_round"):
            # by now, since the module goes on with its own while they are averaged in the background
            super().step(wait_for_delayed_updates=True)
            self._apply_averaged_buffers()
            self._load_buffers(self.module_buffers)
        output = super().step(*args, **kwargs)
        self._apply_averaged_buffers()
        return output

    def _load_buffers(self, buffers: ModuleBuffers) -> None:
        if not buffers.are_as_described:
            self._are_offered.fill_(False)
            self._say("not averaged: the module has given one of them another shape")
        with self.get_tensors():
            buffers.load()

    def _apply_averaged_buffers(self) -> None:
        outcome = _Outcome(int(self._outcome))
        if self.module_buffers is None or outcome is _Outcome.NONE_YET:
            return
        self._outcome.zero_()
        if outcome is not _Outcome.AVERAGED:
            self._say(f"not averaged: {_WHY_NOT[outcome]}")
            return
        with self.get_tensors():
            mended = self.module_buffers.apply()
        if mended:
            logger.warning(f"Values that were not finite were replaced by the swarm's average in {', '.join(mended)}")

    def _say(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self.buffers_left_out = what
            logger.warning(f"The buffers of the module, such as BatchNorm's statistics, are {what}")

    def get_current_state(self) -> tuple[Any, Any, Any]:
        metadata, tensors, infos = super().get_current_state()
        state = None if self.module_buffers is None else self.module_buffers.state()
        if self.module_buffers is None or state is None:
            return metadata, tensors, infos
        # behind all else, where hivemind's peers look for nothing
        metadata[_WORD] = [self.module_buffers.fingerprint, len(state)]
        return metadata, [*tensors, *state], [*infos, *(_info_of(one) for one in state)]

    def load_state_from_peers(self, *args: Any, **kwargs: Any) -> Any:
        self._downloaded_buffers = None
        output = super().load_state_from_peers(*args, **kwargs)
        self._take_over_download()
        return output

    def _take_over_download(self) -> None:
        downloaded, self._downloaded_buffers = self._downloaded_buffers, None
        if self.module_buffers is None or downloaded is None:
            return
        with self.get_tensors():
            fits = self.module_buffers.load_state(downloaded)
        if not fits:
            self._say("not downloaded: the state of the swarm has none that fit this module, which keeps its own")

    @property
    def state_compression(self) -> CompressionBase:
        """The codec of a download."""
        return self._state_compression

    @state_compression.setter
    def state_compression(self, codec: CompressionBase) -> None:
        self._state_compression = codec if self.module_buffers is None else SendsExactly(codec)

    # -- in the averager's own process --------------------------------------------------------------------------

    async def _step(self, *, step: StepControl, future_for_init: Any) -> None:
        if self.module_buffers is not None and bool(self._are_offered):
            record = [*self.serializer.loads(step.data_for_gather), [_WORD, self.module_buffers.fingerprint]]
            step._data_for_gather = self.serializer.dumps(record)
        await super()._step(step=step, future_for_init=future_for_init)

    async def _aggregate_with_group(self, group_info: GroupInfo, min_vector_size: int, **kwargs: Any) -> Any:
        outcome = self._agree([self.serializer.loads(gathered) for gathered in group_info.gathered])
        if self.module_buffers is not None and outcome is _Outcome.AVERAGED:
            added = self.module_buffers.tensors
            infos = [_info_of(one, key) for one, key in zip(added, self.module_buffers.keys, strict=True)]
            kwargs["tensor_infos"] = (*kwargs["tensor_infos"], *infos)
            kwargs["compression"] = SendsExactly(kwargs["compression"])
            kwargs["added"] = added
        gathered = await super()._aggregate_with_group(group_info, min_vector_size, **kwargs)
        self._outcome.fill_(outcome)
        return gathered

    async def _run_allreduce_inplace_(
        self,
        tensors: Sequence[torch.Tensor],
        group_info: GroupInfo,
        *args: Any,
        added: Sequence[torch.Tensor] = (),
        **kwargs: Any,
    ) -> None:
        await super()._run_allreduce_inplace_((*tensors, *added), group_info, *args, **kwargs)

    def _agree(self, records: Sequence[list[Any]]) -> _Outcome:
        """Whether a group averages buffers; all its peers have the same records, and come to the same answer."""
        if self.module_buffers is None:
            return _Outcome.NONE_YET
        if not all(map(is_marked, records)):
            return _Outcome.PLAIN
        said = [next((one[1] for one in record if _is_word(one)), None) for record in records]
        if None in said:
            return _Outcome.WITHOUT
        return _Outcome.AVERAGED if all(one == said[0] for one in said) else _Outcome.OTHERS


class DownloadsBuffers(AveragerBase):
    """Base to put *behind* hivemind's averager of the state: it is shown a download without the buffers."""

    local_epoch: int
    module_buffers: ModuleBuffers | None
    _downloaded_buffers: Sequence[torch.Tensor] | None

    def load_state_from_peers(self, *args: Any, **kwargs: Any) -> Any:
        loaded = super().load_state_from_peers(*args, **kwargs)
        if loaded is None:
            return None
        metadata, tensors = loaded
        fingerprint, count = sent_buffers(metadata)
        kept = max(0, len(tensors) - count)
        epoch = metadata.get("epoch") if isinstance(metadata, dict) else None
        if isinstance(epoch, int) and epoch >= self.local_epoch:  # else hivemind refuses the state
            fits = self.module_buffers is not None and fingerprint == self.module_buffers.fingerprint
            self._downloaded_buffers = tensors[kept:] if fits else ()
        return metadata, tensors[:kept]


def sent_buffers(metadata: Any) -> tuple[str | None, int]:
    """Fingerprint and number of the buffers in a download; anybody may send anything."""
    word = metadata.get(_WORD) if isinstance(metadata, dict) else None
    if isinstance(word, (list, tuple)) and len(word) == 2 and isinstance(word[1], int) and word[1] >= 0:
        return str(word[0]), word[1]
    return None, 0


def _is_word(one: Any) -> bool:
    return isinstance(one, (list, tuple)) and len(one) == 2 and one[0] == _WORD


def _info_of(tensor: torch.Tensor, key: ExactKey | None = None) -> CompressionInfo:
    return CompressionInfo.from_tensor(tensor, key=key or ExactKey())
