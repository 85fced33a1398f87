"""Adds up the parts of a group of senders, of whom any may leave, or send what is no part."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hivemind.averaging.partition import TensorPartReducer

from hivenb.engine.exchange.exact_tensors import LargestOfAll
from hivenb.engine.trust.aggregation import (
    NO_WEIGHT,
    CenteredClipping,
    RefusedPart,
    checked_norm,
    checked_weight,
)


@dataclass(frozen=True)
class PartRules:
    """What a reducer takes of a group, and what it makes of that.

    :param types: of the parts, in which they are added up, in single precision at least
    :param largest: numbers of the parts of which it makes the largest value instead of the mean
    :param largest_weights: of the senders; what one claims beyond that does not count
    :param check: called with a sender's number, that of its part, the norm and weight; may refuse it
    :param clips: whether it makes the center of the parts instead of their mean
    :param on_refused: called with the number of a sender whose part was not taken, and why
    :param on_weight: called with the number of a sender, the weight that it claims and the one that it counts with
    """

    types: Sequence[torch.dtype] = ()
    largest: Collection[int] = ()
    largest_weights: Sequence[float] = ()
    check: Callable[[int, int, float, float], None] = lambda sender_index, part_index, norm, weight: None
    clips: bool = False
    on_refused: Callable[[int, str], None] = lambda sender_index, reason: None
    on_weight: Callable[[int, float, float], None] = lambda sender_index, claimed, counted: None


class WeightedSum:
    """In place of the tensor in which hivemind's reducer adds up a part of all senders.

    One without any weight, such as a peer that only helps, counts where nobody has one, and not at all otherwise: its
    share of 1e-18 would be seen beside zeros.

    :param zeros: of the part's shape, and the type in which it is added up
    """

    def __init__(self, zeros: torch.Tensor) -> None:
        self._sum = zeros
        self._has_weight = False

    def add_(self, part: torch.Tensor, alpha: float) -> None:
        """Take a sender's part in, with its weight."""
        has_weight = alpha > NO_WEIGHT
        if has_weight and not self._has_weight:
            torch.mul(part.to(self._sum.dtype), alpha, out=self._sum)
        elif has_weight or not self._has_weight:
            self._sum.add_(part, alpha=alpha)
        self._has_weight |= has_weight

    def div_(self, total_weight: float) -> torch.Tensor:
        """The mean."""
        return self._sum.div_(total_weight)


class FaultTolerantReducer(TensorPartReducer):
    """``hivemind``'s ``TensorPartReducer`` of which no sender takes the others' averages away, be it by leaving."""

    accumulator: Any

    def __init__(self, part_shapes: Sequence[torch.Size], num_senders: int, rules: PartRules):
        self._rules = rules
        self._largest_weights = rules.largest_weights or (math.inf,) * num_senders
        #: of each sender, the part that it sends next; hivemind counts a part only once the loop comes to it
        self._next_parts = [0] * num_senders
        super().__init__(part_shapes, num_senders)

    def reset_accumulators(self) -> None:
        super().reset_accumulators()
        if self.finished.is_set():
            return
        # hivemind/averaging/partition.py adds up in single precision, whatever it is sent
        dtype = self._wide_type(self.current_part_index)
        if self.current_part_index in self._rules.largest:
            self.accumulator = LargestOfAll()
        elif self._rules.clips and dtype.is_floating_point:
            self.accumulator = CenteredClipping()
        else:
            self.accumulator = WeightedSum(self.accumulator.to(dtype))

    def _wide_type(self, part_index: int) -> torch.dtype:
        return torch.promote_types(self._rules.types[part_index], torch.float32) if self._rules.types else torch.float32

    async def accumulate_part(
        self, sender_index: int, part_index: int, tensor_part: torch.Tensor, weight: float = 1.0
    ) -> torch.Tensor:
        # before hivemind counts it as received: a group would wait for what could not be added
        try:
            self._take_turn(sender_index, part_index)
            claimed, norm = self._checked(part_index, tensor_part, weight)
            weight = min(claimed, self._largest_weights[sender_index])
            self._rules.on_weight(sender_index, claimed, weight)
            self._rules.check(sender_index, part_index, norm, weight)
        except RefusedPart as e:
            self._rules.on_refused(sender_index, str(e))
            raise
        # All senders of a part wait for one future. Of a sender that is gone, the request is cancelled, and asyncio
        # cancels what it waits for with it; the others would wait until allreduce_timeout
        return await asyncio.shield(
            super().accumulate_part(sender_index, part_index, tensor_part.detach(), weight=weight)
        )

    def _take_turn(self, sender_index: int, part_index: int) -> None:
        """Note that a sender's part is there: one that came twice would count in place of another sender's.

        :raises RefusedPart: if another one is the sender's next
        """
        if part_index != self._next_parts[sender_index]:
            raise RefusedPart("it is not the next one of its sender")
        self._next_parts[sender_index] += 1

    def _checked(self, part_index: int, part: torch.Tensor, weight: float) -> tuple[float, float]:
        """The weight with which a part counts, and its norm.

        :raises RefusedPart: if it cannot be added to the others'
        """
        weight, norm = checked_weight(weight), 0.0
        if part_index < self.num_parts:  # else hivemind complains
            takes_largest = part_index in self._rules.largest
            dtype = (
                self._rules.types[part_index] if takes_largest and self._rules.types else self._wide_type(part_index)
            )
            norm = checked_norm(part, self.part_shapes[part_index], dtype)
        return weight or NO_WEIGHT, norm

    def finalize(self) -> None:
        # hivemind warns of each round in which somebody is missing; who was, the round's outcome tells. It would
        # cancel the part that is under way, and does no more than that
        if not self.finished.is_set() and self.num_parts:
            self.current_part_future.cancel()
            self.accumulator = None
            self.finished.set()
        super().finalize()
