"""The peers of a group send each other all that they have, and each of them averages it: an all-gather.

hivemind's all-reduce sends each part to the one of a group who averages it, and the average comes back: a way there
and a way back. Sending everything is one way, and nobody waits for an answer; between two peers it is as many bytes.

Among more, each sends to all others: that is for long lines, which all of them have to report, and for so few numbers
that their bytes take less than the way that this saves. On a short line, it costs the cores more than it gives. Each
makes the averages by what it knows of the others' samples and of usual norms: where that differs, so do the averages,
until the state is averaged next.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import torch
from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.partition import AllreduceException
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils.asyncio import aiter_with_timeout

from hivenb.engine.exchange.part_messages import PartMessage
from hivenb.engine.exchange.runner import FaultTolerantRunner
from hivenb.engine.trust.aggregation import RefusedPart

#: Numbers of a model beyond which one way less is nothing beside the bytes. Shared out, those are sent a little faster:
#: 1.85 s for ten million in half precision at 100 Mbit/s, and 2.05 s like this.
MOST_NUMBERS = 1 << 20

#: Numbers that one of more than two peers sends to all others together, at most: 20 ms at 50 Mbit/s.
MOST_TO_ALL = 1 << 15

#: In place of an average, which each makes itself.
_TAKEN = PartMessage(code=averaging_pb2.AVERAGED_PART)


def suits_all_gather(
    fractions: Sequence[float], tensors: Sequence[torch.Tensor], are_of_ours: bool, are_far: bool
) -> bool:
    """Whether a group exchanges like this. All in it come to the same answer.

    :param fractions: that each of the group would average; none of what somebody averages whom nobody can dial
    :param tensors: that are averaged
    :param are_of_ours: whether nobody is a peer of plain hivemind
    :param are_far: whether the lines of all are long
    """
    numbers, others = sum(tensor.numel() for tensor in tensors), len(fractions) - 1
    # hivemind gives a tensor without numbers to the first of a group, whoever averages the rest
    if not (are_of_ours and others and all(fractions) and all(tensor.numel() for tensor in tensors)):
        return False
    return numbers <= MOST_NUMBERS if others == 1 else are_far and numbers * others <= MOST_TO_ALL


class AllGather(FaultTolerantRunner):
    """The exchange of a group for which :func:`suits_all_gather` holds.

    As in hivemind's all-reduce, a codec changes what the others get, and none of a peer's own numbers.
    """

    def __init__(self, *, p2p: Any, ordered_peer_ids: Sequence[PeerID], **kwargs: Any):
        here = tuple(float(peer == p2p.peer_id) for peer in ordered_peer_ids)
        kwargs |= {"peer_fractions": here, "modes": (AveragingMode.NODE,) * len(here)}
        super().__init__(p2p=p2p, ordered_peer_ids=ordered_peer_ids, **kwargs)
        self._own_index = self.ordered_peer_ids.index(self.peer_id)
        #: of each other peer, counts parts that it has got a copy of, or gets none: those may be changed
        self._copied = {peer: asyncio.Semaphore(0) for peer in self.ordered_peer_ids if peer != self.peer_id}

    def should_delay_results(self, peer_id: PeerID) -> bool:
        return False

    def _index_of_parts_for(self, peer: PeerID) -> int:
        return self._own_index

    @contextlib.asynccontextmanager
    async def _sending(self) -> AsyncGenerator[None, None]:
        sending = [asyncio.create_task(self._communicate_with_peer(other)) for other in self._copied]
        try:
            yield
        except BaseException:
            for task in sending:
                task.cancel()
            raise
        finally:
            await asyncio.gather(*sending, return_exceptions=True)  # what went wrong is in the notes

    def _has_ended_with(self, peer_id: PeerID) -> None:
        super()._has_ended_with(peer_id)
        if peer_id != self.peer_id:
            # not where it is sent: to one who has left before, that never begins
            for _ in range(self.tensor_part_reducer.num_parts):
                self._copied[peer_id].release()

    async def _all_have_copied(self) -> None:
        for copied in self._copied.values():
            await copied.acquire()

    async def _exchange_with(self, peer_id: PeerID) -> None:
        if peer_id != self.peer_id:
            await self._send_to(peer_id)
            return
        sender = self.sender_peer_ids.index(self.peer_id)
        try:
            for number, own in enumerate(self.parts_for_local_averaging):
                average = await self.tensor_part_reducer.accumulate_part(sender, number, own, weight=self.weight)
                await self._all_have_copied()
                self.tensor_part_container.register_processed_part(self._own_index, number, average - own)
        except RefusedPart:
            for _ in self.parts_for_local_averaging[number:]:
                await self._all_have_copied()  # the others are to refuse them, too
            raise

    async def _send_to(self, peer_id: PeerID) -> None:
        taken, count = 0, self.tensor_part_reducer.num_parts
        answers = await self._get_peer_stub(peer_id).rpc_aggregate_part(self._copies_for(peer_id))
        async for answer in aiter_with_timeout(answers, self.reducer_timeout):
            if answer.code != averaging_pb2.AVERAGED_PART:
                raise AllreduceException(f"{peer_id} sent {averaging_pb2.MessageCode.Name(answer.code)}")
            taken += 1
        if taken != count:
            raise AllreduceException(f"{peer_id} took {taken} parts of {count}")

    async def _copies_for(self, peer_id: PeerID) -> AsyncIterator[PartMessage]:
        self.tensor_part_container._inputs_consumed_by_peer[self._own_index] = False  # they are for all others, too
        async for message in self._generate_input_for_peer(self._own_index):
            self._copied[peer_id].release()
            yield message

    async def _answer(self, part: torch.Tensor, average: torch.Tensor, kind: int) -> PartMessage:
        return _TAKEN
