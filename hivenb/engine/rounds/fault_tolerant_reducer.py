"""Adds up the parts of a group of senders, of whom any may leave, or send what is no part."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from hivemind.averaging.partition import TensorPartReducer

from hivenb.engine.rounds.exact_tensors import LargestOfAll
from hivenb.engine.rounds.refused_parts import NO_WEIGHT, RefusedPart, checked_norm, checked_weight


class FaultTolerantReducer(TensorPartReducer):
    """``hivemind``'s ``TensorPartReducer`` of which no sender takes the others' averages away, be it by leaving.

    :param types: of the parts, in which they are added up, in single precision at least
    :param largest: numbers of the parts of which it makes the largest value instead of the mean
    :param largest_weights: of the senders; what one claims beyond that does not count
    :param on_refused: called with the number of a sender whose part was not taken, and why
    """

    accumulator: Any

    def __init__(
        self,
        part_shapes: Sequence[torch.Size],
        num_senders: int,
        types: Sequence[torch.dtype] = (),
        largest: Collection[int] = (),
        largest_weights: Sequence[float] = (),
        on_refused: Callable[[int, str], None] = lambda sender_index, reason: None,
    ):
        self._types, self._largest, self._on_refused = types, largest, on_refused
        self._largest_weights = largest_weights or (math.inf,) * num_senders
        super().__init__(part_shapes, num_senders)

    def reset_accumulators(self) -> None:
        super().reset_accumulators()
        if self.finished.is_set():
            return
        if self._types:
            # hivemind/averaging/partition.py adds up in single precision, whatever it is sent
            self.accumulator = self.accumulator.to(self._wide_type(self.current_part_index))
        if self.current_part_index in self._largest:
            self.accumulator = LargestOfAll()

    def _wide_type(self, part_index: int) -> torch.dtype:
        return torch.promote_types(self._types[part_index], torch.float32) if self._types else torch.float32

    async def accumulate_part(
        self, sender_index: int, part_index: int, tensor_part: torch.Tensor, weight: float = 1.0
    ) -> torch.Tensor:
        # before hivemind counts it as received: a group would wait for what could not be added
        try:
            weight = min(self._checked(part_index, tensor_part, weight), self._largest_weights[sender_index])
        except RefusedPart as e:
            self._on_refused(sender_index, str(e))
            raise
        # All senders of a part wait for one future. Of a sender that is gone, the request is cancelled, and asyncio
        # cancels what it waits for with it; the others would wait until allreduce_timeout
        return await asyncio.shield(
            super().accumulate_part(sender_index, part_index, tensor_part.detach(), weight=weight)
        )

    def _checked(self, part_index: int, part: torch.Tensor, weight: float) -> float:
        """The weight with which a part counts.

        :raises RefusedPart: if it cannot be added to the others'
        """
        weight = checked_weight(weight)
        if part_index < self.num_parts:  # else hivemind complains
            takes_largest = part_index in self._largest
            dtype = self._types[part_index] if takes_largest and self._types else self._wide_type(part_index)
            checked_norm(part, self.part_shapes[part_index], dtype)
        return weight or NO_WEIGHT
