"""What of a module neither the optimizer nor the averaged buffers cover: frozen layers, above all.

No round averages it. What peers have of it is compared by digests, and what differs comes from another peer, or is
said.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

#: Bytes of it at most of which there is a copy in main memory, to be served whatever is in the module at the moment.
MOST_COPIED = 2**25

#: Bytes of a piece that is sent in one answer.
PIECE = 2**20

#: Numbers that are hashed at a time, and numbers of each tensor by which it is noticed that training changes it.
_CHUNK, _SAMPLE = 2**22, 16

#: Hexadecimal digits of a digest.
DIGITS = 32

#: In these all values are hashed, too, that may be held in more, or in the other one, by another peer.
_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class RestEntry:
    """One tensor, as peers compare it.

    :param name: in the module
    :param shape: of it
    :param dtype: its type, as text without ``torch.``
    :param digests: of its values by the types in which they were hashed; none if training changes it
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    digests: Mapping[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize

    @property
    def is_moving(self) -> bool:
        """Whether training changes it, such as a target network that follows by averaging."""
        return not self.digests

    def is_same(self, other: RestEntry) -> bool:
        """Whether two peers have the same, be it rounded: to the type of one of them."""
        if self.shape != other.shape:
            return False
        types = (self.dtype, other.dtype)
        return any(one in self.digests and self.digests[one] == other.digests.get(one) for one in types)


@dataclass(frozen=True)
class _Place:
    """Where a tensor is: a module may put another one there at any time."""

    name: str
    owner: nn.Module
    attribute: str
    is_buffer: bool

    def read(self) -> torch.Tensor:
        """The tensor as it is now."""
        tensors: Any = self.owner._buffers if self.is_buffer else self.owner._parameters
        tensor: torch.Tensor = tensors[self.attribute]
        return tensor.detach()

    @property
    def is_dense(self) -> bool:
        """Whether it is made of its numbers and nothing else."""
        return _is_dense(self.read())

    @property
    def quantized_by(self) -> Any:
        """What else it takes to know its values, as bitsandbytes keeps it; ``None`` for most."""
        parameter = self.owner._parameters.get(self.attribute)
        state = getattr(parameter, "quant_state", None)
        return getattr(parameter, "SCB", None) if state is None else state


class ModuleRest:
    """What of a module no round averages. For the thread that trains, but for :meth:`piece`.

    :param module: on its device, with the weights that it begins with
    :param trained: what the optimizer has
    :param buffers_are_averaged: whether they are; else they are each peer's own
    """

    def __init__(self, module: nn.Module, trained: Iterable[torch.Tensor], buffers_are_averaged: bool = True):
        self._places = tuple(_places(module, {id(one) for one in trained}, buffers_are_averaged))
        self._numbers = {place.name: number for number, place in enumerate(self._places)}
        #: bytes of each; the averager's process reads no tensor of a GPU
        self.sizes = [place.read().nbytes if place.is_dense else 0 for place in self._places]
        self._copies: dict[int, torch.Tensor] = {}
        self._entries: list[RestEntry] = []
        self._samples: list[torch.Tensor] = []
        self.look_at_all()

    def __len__(self) -> int:
        return len(self._places)

    @property
    def entries(self) -> tuple[RestEntry, ...]:
        """As peers compare them."""
        return tuple(self._entries)

    @torch.no_grad()
    def look_at_all(self) -> None:
        """Hash all of it anew, and copy it if it is small."""
        tensors = [place.read() for place in self._places]
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            self._entries = list(pool.map(_entry_of, self._places))
        copied = [number for number in range(len(self)) if self.travels(number) and sum(self.sizes) <= MOST_COPIED]
        self._copies = {number: _bytes_of(tensors[number]) for number in copied}
        self._samples = [_sample_of(tensor) for tensor in tensors]

    @torch.no_grad()
    def look_for_changes(self) -> bool:
        """Note what training changes; such tensors have no digest from then on. Cheap: looks at a few numbers of each.

        :returns: whether there is any that was not known
        """
        is_new = False
        for number, place in enumerate(self._places):
            entry, tensor = self._entries[number], place.read()
            if not entry.is_moving and not torch.equal(_sample_of(tensor), self._samples[number]):
                self._entries[number] = RestEntry(entry.name, entry.shape, entry.dtype)
                is_new = True
            if self._entries[number].is_moving and number in self._copies:
                self._copies[number] = _bytes_of(tensor)
        return is_new

    def travels(self, number: int) -> bool:
        """Whether one can be taken over from another peer: not where its numbers alone do not tell its values."""
        return self._places[number].is_dense and self._places[number].quantized_by is None

    def number_of(self, name: str) -> int | None:
        """Of the tensor of that name."""
        return self._numbers.get(name)

    def piece(self, number: int, start: int) -> torch.Tensor:
        """Some bytes of a tensor, from one on; from any thread."""
        copy = self._copies.get(number)
        if copy is None:
            tensor = self._places[number].read()
            size = tensor.element_size()
            flat = tensor.reshape(-1)[start // size : (start + PIECE) // size]
            return _bytes_of(flat)
        return copy[start : start + PIECE].clone()

    @torch.no_grad()
    def take_over(self, number: int, theirs: RestEntry, received: torch.Tensor) -> bool:
        """Have what another peer has.

        :param theirs: what that peer has said of it
        :param received: its bytes
        :returns: whether they are what it has said; if not, nothing is changed
        """
        value = received.view(dtype_of(theirs.dtype)).reshape(theirs.shape)
        if theirs.is_moving:
            if value.is_floating_point() and not bool(value.isfinite().all()):
                return False
        elif digests_of(value) != dict(theirs.digests):
            return False
        place = self._places[number]
        place.read().copy_(value)
        self._entries[number] = _entry_of(place)
        if theirs.is_moving:
            own = self._entries[number]
            self._entries[number] = RestEntry(own.name, own.shape, own.dtype)
        self._samples[number] = _sample_of(place.read())
        if number in self._copies:
            self._copies[number] = _bytes_of(place.read())
        return True


def _places(module: nn.Module, seen: set[int], with_buffers: bool) -> Iterator[_Place]:
    for prefix, owner in module.named_modules():
        start = f"{prefix}." if prefix else ""
        for attribute, parameter in owner._parameters.items():
            if parameter is not None and id(parameter) not in seen and _has_values(parameter):
                seen.add(id(parameter))
                yield _Place(start + attribute, owner, attribute, False)
        for attribute, buffer in owner._buffers.items() if with_buffers else ():
            if buffer is None or id(buffer) in seen or attribute in owner._non_persistent_buffers_set:
                continue
            # all others are averaged, or downloaded with what is averaged
            if _has_values(buffer) and not _is_dense(buffer):
                seen.add(id(buffer))
                yield _Place(start + attribute, owner, attribute, True)


def _has_values(tensor: torch.Tensor) -> bool:
    return not is_lazy(tensor) and not tensor.is_meta and tensor.numel() > 0


def dtype_of(name: str) -> torch.dtype:
    """The type of that name.

    :raises ValueError: if there is none: anybody may say anything
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"there is no type {name[:40]!r}")
    return found


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@torch.no_grad()
def _entry_of(place: _Place) -> RestEntry:
    tensor = place.read()
    more = b""
    if torch.is_tensor(state := place.quantized_by):
        more = _bytes_of(state).numpy().tobytes()
    elif hasattr(state, "as_dict"):
        parts = state.as_dict(packed=True)
        more = b"".join(_bytes_of(parts[key]).numpy().tobytes() for key in sorted(parts) if torch.is_tensor(parts[key]))
    return RestEntry(place.name, tuple(tensor.shape), _name_of(tensor.dtype), digests_of(tensor, more))


@torch.no_grad()
def digests_of(tensor: torch.Tensor, more: bytes = b"") -> dict[str, str]:
    """Digests of a tensor's values, equal wherever and however they lie in memory.

    :param more: what belongs to them
    :returns: by types: its own one, and, of floating-point numbers, those to which another peer may have rounded them
    """
    parts = _parts_of(tensor)
    types = [tensor.dtype]
    if tensor.is_floating_point() and _is_dense(tensor) and tensor.element_size() >= 2:
        types += [one for one in (torch.float32, *_HALVES) if one.itemsize <= tensor.element_size()]
    hashes = {_name_of(one): (one, hashlib.sha256()) for one in types}
    for part in parts:
        flat = part.reshape(-1)
        for start in range(0, flat.numel(), _CHUNK):
            chunk = flat[start : start + _CHUNK].cpu()
            for one, digest in hashes.values():
                rounded = chunk.to(one) if part is tensor else chunk
                digest.update(_bytes_of(rounded).numpy().data)
    for _, digest in hashes.values():
        digest.update(more)
    return {name: digest.hexdigest()[:DIGITS] for name, (_, digest) in hashes.items()}


def _is_dense(tensor: torch.Tensor) -> bool:
    is_made_of_others = hasattr(tensor, "__tensor_flatten__")  # as torchao's quantized ones
    return tensor.layout is torch.strided and not tensor.is_quantized and not is_made_of_others


def _parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The dense tensors that a tensor is made of."""
    if _is_dense(tensor):
        return [tensor]
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in _parts_of(getattr(tensor, name))]
    if tensor.layout is not torch.strided:
        sparse = tensor.to_sparse_coo().coalesce()
        return [sparse.indices(), sparse.values()]
    if tensor.qscheme() is torch.per_tensor_affine:
        scale = torch.tensor([tensor.q_scale(), float(tensor.q_zero_point())], dtype=torch.float64)
        return [tensor.int_repr(), scale]
    return [tensor.int_repr(), tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).clone()


def _sample_of(tensor: torch.Tensor) -> torch.Tensor:
    if not _is_dense(tensor):
        return torch.zeros(0)
    flat = tensor.reshape(-1)
    places = torch.linspace(0, flat.numel() - 1, min(_SAMPLE, flat.numel()), dtype=torch.float64).long()
    return flat[places.to(flat.device)].cpu().clone()
