"""What is not taken from a group: parts, averages and weights that are not finite, too large, or of another shape."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from hivemind.averaging.partition import AllreduceException, TensorPartContainer
from hivemind.p2p import PeerID

#: Of a part. Squares of larger numbers are soon infinite in single precision, and with them the second moment of Adam
#: and the deviation by which codecs of eight bits scale; no sum of parts of that size is, whoever counts how much.
LARGEST_NORM = 1e18

#: Of a sender. With more than that, sums of parts that were taken might be infinite.
LARGEST_WEIGHT = 1e12

#: In place of a weight of zero. Beside any other weight it is lost in rounding, and where nobody has one, the mean is
#: one of numbers; hivemind divides by zero.
NO_WEIGHT = 1e-18


class RefusedPart(AllreduceException):
    """What a peer has sent is not taken; the message says why, in words."""


def norm_of(part: torch.Tensor) -> float:
    """The length of a part as a vector, in single precision at least; not finite if one of its numbers is not.

    :param part: of any shape and type; integers, which are always finite, have none
    """
    if not part.is_floating_point():
        return 0.0
    wide = torch.promote_types(part.dtype, torch.float32)
    return float(torch.linalg.vector_norm(part.detach(), dtype=wide))


def checked_norm(part: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> float:
    """The norm of a part that a peer has sent, if it can be averaged with the others'.

    :param part: as it was decoded
    :param shape: that it has to have
    :param dtype: of what it is to be added to
    :raises RefusedPart: if it cannot
    """
    if part.shape != shape:
        # some of them could be added, a single number to all of a part
        raise RefusedPart(f"it is of shape {_in_words(part.shape)} instead of {_in_words(shape)}")
    if not torch.can_cast(part.dtype, dtype):
        raise RefusedPart(f"it is of {part.dtype}, which cannot be added to {dtype}")
    norm = norm_of(part)
    if not norm <= LARGEST_NORM:
        what = "of nan" if math.isnan(norm) else f"beyond {LARGEST_NORM:g}, or infinite"
        raise RefusedPart(f"its norm is {what}")
    return norm


def checked_weight(weight: float) -> float:
    """The weight of a sender.

    :raises RefusedPart: if it is none
    """
    if not 0.0 <= weight <= LARGEST_WEIGHT:
        raise RefusedPart(f"its weight is {weight:g}")
    return weight


class CheckedParts(TensorPartContainer):
    """``hivemind``'s ``TensorPartContainer`` that takes only averages that can be ones.

    A reducer whose average was refused counts as one that has failed: this peer's own numbers stay.
    """

    on_refused: Callable[[int, str], None]
    _check: Callable[[int, float], None] | None
    _trusted: set[int]

    @classmethod
    def of(
        cls,
        made: Any,
        on_refused: Callable[[int, str], None],
        check: Callable[[int, float], None] | None = None,
        own_index: int | None = None,
    ) -> CheckedParts:
        """The same container, which hivemind has made already.

        :param made: to which no average was given yet
        :param on_refused: called with the place of a reducer in the group, and why
        :param check: called with that place and the norm of each part; may refuse it
        :param own_index: place of this peer, whose own averages are made of what was looked at
        """
        made.__class__ = cls
        made.on_refused, made._check = on_refused, check
        made._trusted = set() if own_index is None else {own_index}
        checked: CheckedParts = made
        return checked

    def check_part(self, peer_index: int, part_index: int, part: torch.Tensor) -> None:
        """See whether a part can be the difference between an average and what this peer has sent.

        :raises RefusedPart: if it cannot
        """
        if part_index >= self.num_parts_by_peer[peer_index]:
            raise RefusedPart("it is one more than there are")
        sent = self._input_parts_by_peer[peer_index][part_index][0]
        norm = checked_norm(part, sent.shape, sent.dtype)
        if self._check is not None:
            self._check(peer_index, norm)

    def register_processed_part(self, peer_index: int, part_index: int, part: torch.Tensor) -> None:
        if peer_index not in self._trusted and not self.finished.is_set():
            try:
                self.check_part(peer_index, part_index, part)
            except RefusedPart as e:
                self.on_refused(peer_index, str(e))
                raise
        super().register_processed_part(peer_index, part_index, part.detach())

    def register_failed_reducer(self, peer_index: int) -> None:
        self._trusted.add(peer_index)  # what comes are zeros
        super().register_failed_reducer(peer_index)

    def finalize(self) -> None:
        # hivemind warns of averages that have not come, in percent of all numbers; from whom, the round's outcome tells
        self.failed_size = 0
        super().finalize()


class Gathered(dict[PeerID, Any]):
    """What the peers of a group have said of themselves, as hivemind's rounds give it, and who of them was refused.

    :param refused: why, in words, by the peer's id
    """

    def __init__(self, said: dict[PeerID, Any], refused: dict[PeerID, str]):
        super().__init__(said)
        self.refused = refused

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self), self.refused)


def _in_words(shape: torch.Size) -> str:
    return str(tuple(shape))
