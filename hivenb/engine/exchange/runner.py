"""Exchanges data with a group, and expects nothing from a peer that has gone or has left it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from hivemind.averaging.allreduce import AllReduceRunner, AveragingMode
from hivemind.averaging.partition import AllreduceException, BannedException, TensorPartReducer
from hivemind.compression import deserialize_torch_tensor
from hivemind.p2p import P2PContext, P2PDaemonError, PeerID, StubBase
from hivemind.proto import averaging_pb2
from hivemind.utils import get_logger
from hivemind.utils.asyncio import achain, aiter_with_timeout, amap_in_executor, as_aiter

from hivenb.engine.exchange.exact_tensors import ExactKey, LargestOfAll
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
    CenteredClipping,
    CheckedParts,
    NormBounds,
    RefusedPart,
    UsualNorms,
    checked_norm,
    checked_weight,
)
from hivenb.engine.trust.reliability import ExchangeNotes

# -- fault tolerant reducer ------------------------------------------------------------------------------------------
#
# Adds up the parts of a group of senders, of whom any may leave, or send what is no part.


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
            self._sum.zero_()
        if has_weight or not self._has_weight:
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


# -- fault tolerant runner -------------------------------------------------------------------------------------------


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
        self.weight = self.weight or NO_WEIGHT  # plain hivemind divides by zero if nobody else has one
        self._bounds = None if rule == NONE else self._norm_bounds(usual, phase)
        check_average = None if self._bounds is None else self._bounds.check_average
        own_index = self.ordered_peer_ids.index(self.peer_id)
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
        if self.peer_id not in self.sender_peer_ids:
            await anext(differences, None)  # there are none
            return
        for tensor in tensors:
            # integers say something, and go all the way
            tensor.add_(await anext(differences), alpha=alpha if tensor.is_floating_point() else 1)
        # what is left, such as closing streams, takes its time where somebody has gone; the round is over
        self._ending = asyncio.create_task(_exhaust(differences))

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
        count = self._count_for(peer)
        call = stub.rpc_aggregate_part

        async def exchange(parts: AsyncGenerator[Any, None]) -> AsyncIterator[Any]:
            streams = streams_for(count) if self._matchmaking.is_of_ours(peer) else 1
            return self._noting(peer, await aggregate_in_streams(call, count, parts, streams))

        stub.rpc_aggregate_part = exchange
        return stub

    def _count_for(self, peer: PeerID) -> int:
        """How many parts a peer gets."""
        return self.tensor_part_container.num_parts_by_peer[self.ordered_peer_ids.index(peer)]

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

    async def _generate_input_for_peer(self, peer_index: int) -> AsyncIterator[averaging_pb2.AveragingData]:
        receiver = self.ordered_peer_ids[peer_index]
        async for message in super()._generate_input_for_peer(peer_index):
            await self._fair_sending.turn_of(receiver)
            yield message
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
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        sender = context.remote_id
        begins = await anext(stream)
        number, count = place_of(begins)
        parts = self._noting(sender, achain(as_aiter(begins), stream))
        answer = partial(super().rpc_aggregate_part, context=context)
        if not self._expects(sender, number, count):
            if sender not in self.banned_senders:  # else it may try anew what has failed
                self._refuse(sender, "it sent its parts more than once")
            yield averaging_pb2.AveragingData(code=averaging_pb2.PROTOCOL_VIOLATION)
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


async def _exhaust(differences: AsyncIterator[torch.Tensor]) -> None:
    async for _ in differences:
        pass


# -- all gather ------------------------------------------------------------------------------------------------------
#
# Peers of a group send each other all that they have, and each of them averages it: an all-gather.
#
# hivemind's all-reduce sends each part to the one of a group who averages it, and the average comes back: a way there
# and a way back. Sending everything to everyone is one way, and nobody waits for an answer. Between two peers it is as
# many bytes; of n peers each sends n / 2 times as many, which a small model has to spare.


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
