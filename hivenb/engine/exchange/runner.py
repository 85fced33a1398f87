"""Exchanges data with a group, and expects nothing from a peer that has gone or has left it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import torch
from hivemind.averaging.allreduce import AllReduceRunner, AveragingMode
from hivemind.averaging.partition import BannedException
from hivemind.compression import CompressionInfo, deserialize_torch_tensor
from hivemind.p2p import P2PContext, P2PDaemonError, PeerID, StubBase
from hivemind.proto import averaging_pb2
from hivemind.utils import get_logger
from hivemind.utils.asyncio import achain, amap_in_executor, as_aiter

from hivenb.engine.exchange.codecs import codec_of
from hivenb.engine.exchange.exact_tensors import ExactKey
from hivenb.engine.exchange.part_messages import PartMessage, encoded
from hivenb.engine.exchange.reducer import FaultTolerantReducer, PartRules
from hivenb.engine.exchange.sending import FairSending
from hivenb.engine.matchmaking.matchmaking import EpochMatchmaking
from hivenb.engine.network.streams import (
    CLOSED_WITHIN,
    PARTS_LEFT_OPEN,
    JoinedStreams,
    aggregate_in_streams,
    left_open,
    place_of,
    streams_for,
)
from hivenb.engine.trust.aggregation import (
    CENTERED_CLIPPING,
    NO_WEIGHT,
    NONE,
    CheckedParts,
    NormBounds,
    UsualNorms,
)
from hivenb.engine.trust.reliability import ExchangeNotes

logger = get_logger(__name__)

#: Seconds after which the others are dialled, again and again, and for each attempt.
DIAL_AFTER = 0.5


class FaultTolerantRunner(AllReduceRunner):
    """``hivemind``'s ``AllReduceRunner`` that expects nothing from a peer that has gone or has left the group.

    hivemind waits for its data until ``sender_timeout``, by default the whole matchmaking time, and for its averages
    twice as long.

    :param matchmaking: which knows who that is, and who is not one of plain hivemind
    :param largest_weights: gives those of senders
    :param rule: by which what is finite is averaged, one of :mod:`hivenb.engine.trust.aggregation`
    :param usual: norms of the rounds before
    :param phase: which of the rounds of a group it is
    """

    def __init__(
        self,
        *,
        matchmaking: EpochMatchmaking,
        largest_weights: Callable[[Sequence[PeerID]], list[float]],
        rule: str,
        usual: UsualNorms,
        phase: bytes = b"",
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self._matchmaking = matchmaking
        self._exchanges: dict[PeerID, asyncio.Task[None]] = {}
        self._excluded: set[PeerID] = set()
        self._joined: dict[PeerID, JoinedStreams] = {}
        #: those that have opened their only stream
        self._undivided: set[PeerID] = set()
        #: when something has last arrived from a peer
        self._heard_at: dict[PeerID, float] = {}
        self._notes = ExchangeNotes()
        #: streams of others that are answered at present, and whether there are none
        self._answering, self._all_answered = 0, asyncio.Event()
        self._all_answered.set()
        #: what the others still are to have of this peer when it has its averages; made when it has them
        self.ending: asyncio.Task[None] | None = None
        self.weight = self.weight or NO_WEIGHT  # plain hivemind divides by zero if nobody else has one
        self._bounds = None if rule == NONE else self._norm_bounds(usual, phase)
        check_average = None if self._bounds is None else self._bounds.check_average
        own_index = self.ordered_peer_ids.index(self.peer_id)
        inputs = self.tensor_part_container._input_parts_by_peer  # which are dropped where an exchange fails
        self._bytes_by_peer = [sum(part.nbytes for part, _ in parts) for parts in inputs]
        counts = zip(self.ordered_peer_ids, self.tensor_part_container.num_parts_by_peer, strict=True)
        self._fair_sending = FairSending({peer: count for peer, count in counts if peer != self.peer_id})
        CheckedParts.of(self.tensor_part_container, self._refuse_average, check_average, own_index)
        self.tensor_part_reducer = self._reducer(largest_weights(self.sender_peer_ids), rule == CENTERED_CLIPPING)

    def _norm_bounds(self, usual: UsualNorms, phase: bytes) -> NormBounds:
        parts = [[part for part, _ in some] for some in self.tensor_part_container._input_parts_by_peer]
        weight = self.weight if self.peer_id in self.sender_peer_ids else 0.0
        return NormBounds(usual, phase, parts, self.ordered_peer_ids.index(self.peer_id), weight)

    def _reducer(self, weights: list[float], clips: bool) -> FaultTolerantReducer:
        made = self.tensor_part_reducer  # of hivemind's own class, and nothing was added to it yet
        made.finished.set()  # it would complain that it was sent nothing
        types = [part.dtype for part in self.parts_for_local_averaging]
        parts = self.tensor_part_container._input_parts_by_peer[self.ordered_peer_ids.index(self.peer_id)]
        largest = {number for number, (_, info) in enumerate(parts) if info.key == ExactKey(takes_largest=True)}
        if self.peer_id in self.sender_peer_ids:
            weights[self.sender_peer_ids.index(self.peer_id)] = math.inf
        rules = PartRules(types, largest, weights, self._check_sent, clips, self._refuse_sender, self._note_weight)
        return FaultTolerantReducer(made.part_shapes, made.num_senders, rules)

    def _check_sent(self, sender_index: int, part_index: int, norm: float, weight: float) -> None:
        if self._bounds is not None and self.sender_peer_ids[sender_index] != self.peer_id:
            self._bounds.check_sent(sender_index, part_index, norm, weight)

    def _refuse_sender(self, sender_index: int, reason: str) -> None:
        self._refuse(self.sender_peer_ids[sender_index], f"what it sent to be averaged was refused: {reason}")

    def _note_weight(self, sender_index: int, claimed: float, counted: float) -> None:
        self._notes.weights[self.sender_peer_ids[sender_index]] = claimed, counted

    def _refuse_average(self, peer_index: int, reason: str) -> None:
        self._refuse(self.ordered_peer_ids[peer_index], f"what it gave as an average was refused: {reason}")

    def _refuse(self, peer: PeerID, reason: str) -> None:
        if peer == self.peer_id:
            logger.warning(f"This peer takes no part in a round: {reason}")
        else:
            self._notes.refused.setdefault(peer, reason)

    @property
    def notes(self) -> ExchangeNotes:
        """What was seen of the others; of those that were not reached, this one's average is not theirs."""
        over = {peer: exchange for peer, exchange in self._exchanges.items() if exchange.done()}
        failed = {peer for peer, exchange in over.items() if exchange.cancelled() or exchange.exception() is not None}
        return dataclasses.replace(self._notes, unreached=self.banned_senders | failed)

    async def average_into(self, tensors: Sequence[torch.Tensor], alpha: float) -> None:
        """Exchange data with the group until all averages are here; as a peer that only helps, until the others' are.

        :param tensors: those that it was made with; changed in place, each as soon as its average is there. Those of
          a peer that only helps stay as they are
        :param alpha: how far to go towards the average; 1 for all the way
        """
        differences = aiter(self)
        if self.peer_id in self.sender_peer_ids:
            await self._add_to(tensors, differences, alpha)
        else:
            await anext(differences, None)  # there are none
        # what is left, such as closing streams, takes its time where somebody has gone; the round is over
        self.ending = asyncio.create_task(self._give_the_rest(differences))

    async def _add_to(
        self, tensors: Sequence[torch.Tensor], differences: AsyncIterator[torch.Tensor], alpha: float
    ) -> None:
        for tensor, count in zip(tensors, self.tensor_part_container.num_parts_by_tensor, strict=True):
            # integers say something, and go all the way
            step = alpha if tensor.is_floating_point() else 1
            numbers, start = tensor.contiguous().view(-1), 0
            for _ in range(count):
                difference = await anext(differences)
                numbers[start : start + len(difference)].add_(difference, alpha=step)
                start += len(difference)
            if not tensor.is_contiguous():
                tensor.copy_(numbers.view(tensor.shape))

    async def _give_the_rest(self, differences: AsyncIterator[torch.Tensor]) -> None:
        async for _ in differences:  # ends when all was sent
            pass
        await self._all_answered.wait()

    async def run(self) -> AsyncIterator[torch.Tensor]:
        async with self._sending():
            looking = asyncio.create_task(self._exclude_the_gone())
            try:
                async for delta in super().run():
                    yield delta
            finally:
                looking.cancel()

    @contextlib.asynccontextmanager
    async def _sending(self) -> AsyncGenerator[None, None]:
        """What is sent beside what hivemind exchanges: nothing."""
        yield

    def _get_peer_stub(self, peer: PeerID) -> StubBase:
        stub = super()._get_peer_stub(peer)
        index = self._index_of_parts_for(peer)
        count, size = self.tensor_part_container.num_parts_by_peer[index], self._bytes_by_peer[index]
        call = stub.rpc_aggregate_part

        async def exchange(parts: AsyncGenerator[Any, None]) -> AsyncIterator[Any]:
            streams = streams_for(count, size, self.group_size) if self._matchmaking.is_of_ours(peer) else 1
            return self._noting(peer, await aggregate_in_streams(call, count, parts, streams))

        stub.rpc_aggregate_part = exchange
        return stub

    def _index_of_parts_for(self, peer: PeerID) -> int:
        """The index of the peer whose parts a peer gets: of those that it averages."""
        return self.ordered_peer_ids.index(peer)

    async def _noting(self, peer: PeerID, messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for message in messages:
            self._heard_at[peer] = time.monotonic()
            yield message

    async def _communicate_with_peer(self, peer_id: PeerID) -> None:
        exchange = self._exchanges[peer_id] = asyncio.create_task(self._exchange_with(peer_id))
        if peer_id in self._excluded:
            exchange.cancel()
        try:
            await exchange
        except (Exception, asyncio.CancelledError) as e:
            if not self.tensor_part_container.finished.is_set():
                # hivemind's method has done so, unless it was cancelled before it began
                self.tensor_part_container.register_failed_reducer(self.ordered_peer_ids.index(peer_id))
            is_own = peer_id == self.peer_id  # whose numbers were refused, as they would be by anybody
            if (is_own or isinstance(e, (P2PDaemonError, OSError))) and peer_id in self.sender_peer_ids:
                await self._ban_sender(peer_id)
            raise
        finally:
            self._has_ended_with(peer_id)

    def _has_ended_with(self, peer_id: PeerID) -> None:
        """Nothing more is exchanged with a peer."""
        self._fair_sending.leave(peer_id)

    async def _generate_input_for_peer(self, peer_index: int) -> AsyncIterator[PartMessage]:
        # Replaces hivemind/averaging/allreduce.py, whose messages are copied twice more
        receiver = self.ordered_peer_ids[peer_index]
        begins: dict[str, Any] = {"code": averaging_pb2.PART_FOR_AVERAGING, "group_id": self.group_id}
        async for part in self.tensor_part_container.iterate_input_parts_for(peer_index):
            await self._fair_sending.turn_of(receiver)
            yield PartMessage(part, weight=self.weight, **begins)
            begins = {}
        self._fair_sending.leave(receiver)

    async def _exchange_with(self, peer_id: PeerID) -> None:
        await super()._communicate_with_peer(peer_id)

    async def _exclude_the_gone(self) -> None:
        dialled_at = time.monotonic()  # not at once: the data of nearly all rounds arrives before
        while True:
            news, is_to_dial = self._matchmaking.news, time.monotonic() - dialled_at >= DIAL_AFTER
            if is_to_dial:
                dialled_at = time.monotonic()
            for peer, mode in zip(self.ordered_peer_ids, self.modes, strict=True):
                if peer in self._excluded or peer == self.peer_id or not await self._has_gone(peer, mode, is_to_dial):
                    continue
                self._excluded.add(peer)
                if peer in self._exchanges:
                    self._exchanges[peer].cancel()
                if self.tensor_part_reducer.num_parts > 0 and peer in self.sender_peer_ids:
                    await self._ban_sender(peer)
            await asyncio.wait({news}, timeout=max(0.0, dialled_at + DIAL_AFTER - time.monotonic()))

    async def _has_gone(self, peer: PeerID, mode: AveragingMode, is_to_dial: bool) -> bool:
        if peer in self._heard_at:
            # its answers may be late since it sends its data over a slow link
            is_silent = time.monotonic() - self._heard_at[peer] > (self.sender_timeout or math.inf) / 2
            return is_silent and not self._matchmaking.takes_part(peer, self.group_id)
        if not self._matchmaking.takes_part(peer, self.group_id):
            return True
        return is_to_dial and mode is not AveragingMode.CLIENT and not await self._can_be_dialled(peer)

    async def _can_be_dialled(self, peer: PeerID) -> bool:
        try:
            await asyncio.wait_for(self._p2p._client.connect(peer, []), DIAL_AFTER)
        except asyncio.TimeoutError:
            return True  # as far as can be told
        except (P2PDaemonError, OSError, EOFError) as e:
            logger.debug(f"{peer} has left the group: {e!r}")
            return False
        return True

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[PartMessage], context: P2PContext
    ) -> AsyncIterator[PartMessage]:
        self._answering += 1
        self._all_answered.clear()
        try:
            async with contextlib.aclosing(self._answers_to(stream, context)) as answers:
                async for message in answers:
                    yield message
        finally:
            self._answering -= 1
            if not self._answering:
                self._all_answered.set()

    async def _answers_to(
        self, stream: AsyncIterator[PartMessage], context: P2PContext
    ) -> AsyncGenerator[PartMessage, None]:
        sender = context.remote_id
        begins = await anext(stream)
        number, count = place_of(begins)
        parts = self._noting(sender, achain(as_aiter(begins), stream))
        answer = partial(super().rpc_aggregate_part, context=context)
        if not self._expects(sender, number, count):
            if sender not in self.banned_senders:  # else it may try anew what has failed
                self._refuse(sender, "it sent its parts more than once")
            yield PartMessage(code=averaging_pb2.PROTOCOL_VIOLATION)
            return
        if count == 1:
            self._undivided.add(sender)
            seconds = CLOSED_WITHIN if self._matchmaking.is_of_ours(sender) else PARTS_LEFT_OPEN
            async for message in left_open(answer(parts), seconds, lambda _: self._has_all_of(sender)):
                yield message
            return
        joined = self._joined.get(sender) or self._joined.setdefault(sender, JoinedStreams(count, answer))
        answers = joined.serve(number, parts)
        async for message in left_open(answers, CLOSED_WITHIN, partial(joined.is_whole, number)):
            yield message

    async def _accumulate_parts_streaming(
        self, stream: AsyncIterator[PartMessage], sender_index: int
    ) -> AsyncIterator[PartMessage]:
        # Replaces hivemind/averaging/allreduce.py, whose answers are copied twice more
        number = 0
        try:
            parts = amap_in_executor(_decoded, stream, max_prefetch=self.tensor_part_container.prefetch)
            async for part, weight, kind in parts:
                average = await self.tensor_part_reducer.accumulate_part(sender_index, number, part, weight=weight)
                number += 1
                yield await self._answer(part, average, kind)
        except BannedException:  # it has kept this peer waiting
            pass
        finally:
            if number != self.tensor_part_reducer.num_parts:
                await self._ban_sender(self.sender_peer_ids[sender_index])

    async def _answer(self, part: torch.Tensor, average: torch.Tensor, kind: int) -> PartMessage:
        """What a sender gets for its part: how far the average is from it.

        :param kind: of the codec with which the part came
        """

        def answer() -> PartMessage:
            difference = average - part
            return PartMessage(
                encoded(codec_of(kind), difference, CompressionInfo.from_tensor(difference)),
                code=averaging_pb2.AVERAGED_PART,
            )

        return await asyncio.get_running_loop().run_in_executor(None, answer)

    def _expects(self, sender: PeerID, number: int, count: int) -> bool:
        """Whether a stream is a sender's only one, or one of several that is to come; what it sends counts once."""
        if sender in self._undivided:
            return False
        joined = self._joined.get(sender)
        return joined is None or joined.expects(number, count)

    def _has_all_of(self, sender: PeerID) -> bool:
        received = self.tensor_part_reducer.num_parts_received[self.sender_peer_ids.index(sender)]
        return received == self.tensor_part_reducer.num_parts > 0

    async def _ban_sender(self, peer_id: PeerID) -> None:
        if self._has_all_of(peer_id):
            return  # it may close the stream as soon as it has its averages
        await super()._ban_sender(peer_id)
        if self.active_senders | self.banned_senders >= set(self.sender_peer_ids):
            self.all_senders_started.set()  # nobody is left to be waited for


def _decoded(message: PartMessage) -> tuple[torch.Tensor, float, int]:
    """A part, the weight of its sender, and the kind of its codec."""
    return deserialize_torch_tensor(message.tensor_part), message.weight, message.tensor_part.compression
