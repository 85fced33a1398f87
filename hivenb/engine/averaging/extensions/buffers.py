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
from hivemind.compression import CompressionInfo
from hivemind.utils import get_logger
from torch import nn
from torch.nn.parameter import is_lazy

from hivenb.engine.averaging.extensions.extension import Exchange, Extension, GroupRecords, ServedState, Tail
from hivenb.engine.exchange.exact_tensors import ExactKey

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


class AveragedBuffers(Extension):
    """The buffers of a module in the rounds and downloads of an averager of the state.

    :param buffers: that peers average
    """

    name = "module_buffers"

    def __init__(self, buffers: ModuleBuffers):
        self._of_module = buffers
        self._said: set[str] = set()
        #: why the buffers were left out of a round or a download, in words; ``None`` if they never were
        self.why_skipped: str | None = None
        self._agreed = _Outcome.NONE_YET  # in the averager's process
        # for both processes
        self._outcome = torch.zeros(1, dtype=torch.int64).share_memory_()
        self._are_offered = torch.ones(1, dtype=torch.bool).share_memory_()

    # -- in the process that trains -----------------------------------------------------------------------------

    @property
    def numbers(self) -> int:
        return self._of_module.numbers

    def load(self) -> None:
        """Copy what the module holds, for a round to average; while nobody else uses what is averaged."""
        if not self._of_module.are_as_described:
            self._are_offered.fill_(False)
            self._say("not averaged: the module has given one of them another shape")
        self._of_module.load()

    @property
    def has_outcome(self) -> bool:
        """Whether a round is over of which the module does not know yet."""
        return int(self._outcome) != _Outcome.NONE_YET

    def apply(self) -> None:
        """Let the module have what a round has made of them; while nobody else uses what is averaged."""
        outcome = _Outcome(int(self._outcome))
        if outcome is _Outcome.NONE_YET:
            return
        self._outcome.zero_()
        if outcome is not _Outcome.AVERAGED:
            self._say(f"not averaged: {_WHY_NOT[outcome]}")
            return
        if mended := self._of_module.apply():
            logger.warning(f"Values that were not finite were replaced by the swarm's average in {', '.join(mended)}")

    def serve(self, state: ServedState) -> ServedState:
        own = self._of_module.state()
        if own is None:
            return state
        return state.with_tail(self.name, self._of_module.fingerprint, own, [_info_of(one) for one in own])

    def take(self, tail: Tail) -> None:
        if tail.detail != self._of_module.fingerprint or not self._of_module.load_state(tail.tensors):
            self._say("not downloaded: the state of the swarm has none that fit this module, which keeps its own")

    def _say(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self.why_skipped = what
            logger.warning(f"The buffers of the module, such as BatchNorm's statistics, are {what}")

    # -- in the averager's own process --------------------------------------------------------------------------

    def fields(self) -> Sequence[Any]:
        return [[self.name, self._of_module.fingerprint]] if bool(self._are_offered) else []

    def agree(self, group: GroupRecords) -> None:
        self._agreed = self._outcome_of(group)

    def _outcome_of(self, group: GroupRecords) -> _Outcome:
        if not group.are_of_ours:
            return _Outcome.PLAIN
        said = group.said(self.name, 2)
        if None in said:
            return _Outcome.WITHOUT
        return _Outcome.AVERAGED if all(one == said[0] for one in said) else _Outcome.OTHERS

    def join(self, exchange: Exchange) -> Exchange:
        if self._agreed is not _Outcome.AVERAGED:
            return exchange
        return exchange.with_exact(self._of_module.tensors, self._of_module.keys)

    def conclude(self) -> None:
        self._outcome.fill_(self._agreed)


def _info_of(tensor: torch.Tensor) -> CompressionInfo:
    return CompressionInfo.from_tensor(tensor, key=ExactKey())
