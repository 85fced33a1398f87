"""Peers of a group send each other all that they have, and each of them averages it: an all-gather.

hivemind's all-reduce sends each part to the one of a group who averages it, and the average comes back: a way there
and a way back. Sending everything to everyone is one way, and nobody waits for an answer. Between two peers it is as
many bytes; of n peers each sends n / 2 times as many, which a small model has to spare.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import torch
from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.partition import AllreduceException, BannedException
from hivemind.compression import deserialize_torch_tensor
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils.asyncio import aiter_with_timeout, amap_in_executor

from hivenb.engine.exchange.runner import FaultTolerantRunner
from hivenb.engine.trust.aggregation import RefusedPart

#: Numbers of a model beyond which one way less is nothing beside the bytes. Shared out, those are sent a little faster:
#: 1.85 s for ten million in half precision at 100 Mbit/s, and 2.05 s like this.
MOST_NUMBERS = 1 << 20

#: Numbers that a peer may send on top of what it would if they were shared out: 21 ms in single precision at 50 Mbit/s.
MOST_ON_TOP = 1 << 15

#: In place of an average, which each makes itself.
_TAKEN = averaging_pb2.AveragingData(code=averaging_pb2.AVERAGED_PART)


def suits_all_gather(fractions: Sequence[float], tensors: Sequence[torch.Tensor], are_of_ours: bool) -> bool:
    """Whether a group exchanges like this. All in it come to the same answer.

    :param fractions: that each of the group would average; none of what somebody averages whom nobody can dial
    :param tensors: that are averaged
    :param are_of_ours: whether nobody is a peer of plain hivemind
    """
    sizes, peers = [tensor.numel() for tensor in tensors], len(fractions)
    # hivemind gives a tensor without numbers to the first of a group, whoever averages the rest
    if not (are_of_ours and peers > 1 and all(fractions) and all(sizes)):
        return False
    on_top = sum(sizes) * (peers - 1) * (peers - 2) / peers
    return sum(sizes) <= MOST_NUMBERS and on_top <= MOST_ON_TOP


class AllGather(FaultTolerantRunner):
    """The exchange of a group for which :func:`suits_all_gather` holds.

    As in hivemind's all-reduce, a codec changes what the others get, and none of a peer's own numbers. Of somebody who
    dies meanwhile, some may have the numbers and others not: their averages differ by its share, until the next round
    of parameters.
    """

    def __init__(self, *, p2p: Any, ordered_peer_ids: Sequence[PeerID], **kwargs: Any):
        here = tuple(float(peer == p2p.peer_id) for peer in ordered_peer_ids)
        kwargs |= {"peer_fractions": here, "modes": (AveragingMode.NODE,) * len(here)}
        super().__init__(p2p=p2p, ordered_peer_ids=ordered_peer_ids, **kwargs)
        self._own_index = self.ordered_peer_ids.index(self.peer_id)
        others = (peer for peer in self.ordered_peer_ids if peer != self.peer_id)
        #: count parts that may be changed, as far as it goes by each of the others: it has got a copy, or gets none
        self._copied = {peer: asyncio.Semaphore(0) for peer in others}

    def should_delay_results(self, peer_id: PeerID) -> bool:
        return False

    def _count_for(self, peer: PeerID) -> int:
        return self.tensor_part_reducer.num_parts

    @contextlib.asynccontextmanager
    async def _sending(self) -> AsyncGenerator[None, None]:
        sending = [asyncio.create_task(self._communicate_with_peer(peer)) for peer in self._copied]
        try:
            yield
        except BaseException:
            for one in sending:
                one.cancel()
            raise
        finally:
            await asyncio.gather(*sending, return_exceptions=True)  # they are in the notes

    def _has_ended_with(self, peer_id: PeerID) -> None:
        super()._has_ended_with(peer_id)
        # not where it is sent: of one who has left before, that never begins
        for _ in range(self._count_for(peer_id) if peer_id in self._copied else 0):
            self._copied[peer_id].release()

    async def _exchange_with(self, peer_id: PeerID) -> None:
        if peer_id != self.peer_id:
            await self._send_to(peer_id)
            return
        sender = self.sender_peer_ids.index(self.peer_id)
        try:
            for number, own in enumerate(self.parts_for_local_averaging):
                average = await self.tensor_part_reducer.accumulate_part(sender, number, own, weight=self.weight)
                await self._all_have_copies()
                self.tensor_part_container.register_processed_part(self._own_index, number, average - own)
        except RefusedPart:
            for _ in self.parts_for_local_averaging[number:]:
                await self._all_have_copies()  # the others are to refuse them, too
            raise

    async def _all_have_copies(self) -> None:
        """Wait until the next part may be changed."""
        for copied in self._copied.values():
            await copied.acquire()

    async def _send_to(self, peer: PeerID) -> None:
        taken, count = 0, self._count_for(peer)
        answers = await self._get_peer_stub(peer).rpc_aggregate_part(self._copies_for(peer))
        async for answer in aiter_with_timeout(answers, self.reducer_timeout):
            if answer.code != averaging_pb2.AVERAGED_PART:
                raise AllreduceException(f"{peer} sent {averaging_pb2.MessageCode.Name(answer.code)}")
            taken += 1
        if taken != count:
            raise AllreduceException(f"{peer} took {taken} parts of {count}")

    async def _copies_for(self, peer: PeerID) -> AsyncIterator[averaging_pb2.AveragingData]:
        self.tensor_part_container._inputs_consumed_by_peer[self._own_index] = False  # they are for the others, too
        async for message in self._generate_input_for_peer(self._own_index):
            self._copied[peer].release()
            yield message

    async def _accumulate_parts_streaming(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], sender_index: int
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        number = 0
        try:
            async for part, weight in amap_in_executor(
                lambda message: (deserialize_torch_tensor(message.tensor_part), message.weight),
                stream,
                max_prefetch=self.tensor_part_container.prefetch,
            ):
                await self.tensor_part_reducer.accumulate_part(sender_index, number, part, weight=weight)
                number += 1
                yield _TAKEN
        except BannedException:  # it has kept this peer waiting
            pass
        finally:
            if number != self.tensor_part_reducer.num_parts:
                await self._ban_sender(self.sender_peer_ids[sender_index])
