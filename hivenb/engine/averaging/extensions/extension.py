"""What joins an averager of hivemind's: told to the group, agreed on, exchanged, and served to who downloads a state.

An :class:`Extension` sends its tensors behind all that hivemind's averager sends, where a peer of plain hivemind looks
for nothing. Each group decides by what its peers say of themselves whether they are exchanged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from hivemind.compression import CompressionBase, CompressionInfo

from hivenb.engine.exchange.exact_tensors import ExactKey, SendsExactly
from hivenb.engine.matchmaking.group_records import UPSTREAM_FIELDS, epoch_in, is_marked, says

#: In the metadata of a state, what stands behind the tensors of hivemind's averager.
_TAILS = "tails"

#: Extensions that a peer may have at most.
_MOST_TAILS = 8


@dataclass(frozen=True)
class GroupRecords:
    """What the peers of a group say of themselves; all of them have the same, and come to the same answers.

    :param records: of each peer
    :param own: the index of this one
    """

    records: Sequence[list[Any]]
    own: int

    @property
    def epoch(self) -> int:
        """The epoch of the round, as far as this peer knows it; 0 if it is of none."""
        return epoch_in(self.records[self.own]) or 0

    @property
    def are_of_ours(self) -> bool:
        """Whether nobody in the group is a peer of plain hivemind."""
        return all(map(is_marked, self.records))

    def said(self, name: str, length: int) -> list[list[Any] | None]:
        """What each peer says under the name of an extension; ``None`` of a peer that says nothing.

        :param length: of what is said, with the name before it: anybody may say anything
        """
        return [
            next((list(one) for one in record[UPSTREAM_FIELDS:] if _is_said(one, name, length)), None)
            for record in self.records
        ]

    def all_say(self, word: str) -> bool:
        """Whether all are peers of ours that say this word."""
        return self.are_of_ours and all(says(record, word) for record in self.records)


def _is_said(one: Any, name: str, length: int) -> bool:
    return isinstance(one, (list, tuple)) and len(one) == length and one[0] == name


@dataclass(frozen=True)
class Exchange:
    """What a group exchanges in one all-reduce.

    :param tensors: averaged in place
    :param infos: of each of them
    :param compression: the codec
    :param weight: of this peer
    :param weights_are_samples: whether a peer may weigh no more than the samples that it has reported; or than 1
    :param phase: which of several all-reduces of a round it is; empty if there is only one
    """

    tensors: tuple[torch.Tensor, ...]
    infos: tuple[CompressionInfo, ...]
    compression: CompressionBase
    weight: float
    weights_are_samples: bool
    phase: bytes = b""

    def with_exact(self, tensors: Sequence[torch.Tensor], keys: Sequence[ExactKey]) -> Exchange:
        """The same with more tensors, which no codec changes.

        :param keys: what a round makes of each of them
        """
        infos = (CompressionInfo.from_tensor(one, key=key) for one, key in zip(tensors, keys, strict=True))
        return dataclasses.replace(
            self,
            tensors=(*self.tensors, *tensors),
            infos=(*self.infos, *infos),
            compression=SendsExactly(self.compression),
        )


@dataclass(frozen=True)
class ServedState:
    """A state as it travels to a peer that downloads it.

    :param metadata: small values, which hivemind's serializer knows
    :param tensors: all that hivemind's averager sends, and those of extensions behind it
    :param infos: of each of them
    """

    metadata: dict[str, Any]
    tensors: tuple[torch.Tensor, ...]
    infos: tuple[CompressionInfo, ...]

    def with_tail(self, name: str, detail: Any, tensors: Sequence[torch.Tensor], infos: Sequence[Any]) -> ServedState:
        """The same with the tensors of an extension.

        :param name: of the extension
        :param detail: what it says of them
        """
        tails = [*self.metadata.get(_TAILS, ()), [name, detail, len(tensors)]]
        return ServedState({**self.metadata, _TAILS: tails}, (*self.tensors, *tensors), (*self.infos, *infos))


@dataclass(frozen=True)
class Tail:
    """What an extension of another peer has sent of a state.

    :param detail: what it says of the tensors
    :param tensors: as they came
    """

    detail: Any = None
    tensors: tuple[torch.Tensor, ...] = ()


def split_tails(metadata: Any, tensors: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], Mapping[str, Tail]]:
    """The tensors of a state without those of extensions, and these by name; anybody may send anything."""
    said = metadata.get(_TAILS) if isinstance(metadata, dict) else None
    tails = list(said) if isinstance(said, (list, tuple)) and len(said) <= _MOST_TAILS else []
    if not _fit(tails, len(tensors)):
        tails = []
    kept = start = len(tensors) - sum(one[2] for one in tails)
    found: dict[str, Tail] = {}
    for name, detail, count in tails:
        found[name] = Tail(detail, tuple(tensors[start : start + count]))
        start += count
    return tuple(tensors[:kept]), found


def _fit(tails: Sequence[Any], tensors: int) -> bool:
    """Whether tails can be of that many tensors, each of an extension of its own."""
    if not all(map(_is_tail, tails)):
        return False
    return sum(one[2] for one in tails) <= tensors and len({one[0] for one in tails}) == len(tails)


def _is_tail(one: Any) -> bool:
    is_triple = isinstance(one, (list, tuple)) and len(one) == 3
    return is_triple and isinstance(one[0], str) and isinstance(one[2], int) and one[2] >= 0


class Extension:
    """What joins the rounds and the downloads of an averager. This one joins nothing.

    It is made before the averager's process is forked: what both processes are to see lies in shared memory.
    """

    #: under which it sends its part of a state
    name: ClassVar[str] = ""

    # -- in the process that trains -----------------------------------------------------------------------------

    @property
    def numbers(self) -> int:
        """How many numbers it adds to a state."""
        return 0

    def weight(self, epoch: int) -> float | None:
        """With what weight this peer joins the round of an epoch; ``None`` to leave that to hivemind."""
        return None

    def serve(self, state: ServedState) -> ServedState:
        """A state for a peer that downloads it, with what is this extension's."""
        return state

    def take(self, tail: Tail) -> None:
        """Take over what the same extension of another peer has served; empty if that has none."""

    # -- in the averager's own process --------------------------------------------------------------------------

    def fields(self) -> Sequence[Any]:
        """What to tell the group of a round that begins."""
        return ()

    def agree(self, group: GroupRecords) -> None:
        """Know what the group of a round exchanges."""

    def join(self, exchange: Exchange) -> Exchange:
        """What the group exchanges, with what is this extension's."""
        return exchange

    def conclude(self) -> None:
        """The exchange has succeeded."""
