"""The exchanges of an averager with its groups: waiting for nobody who has gone, and saying who has taken part."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from hivemind.averaging.group_info import GroupInfo
from hivemind.compression import CompressionBase, CompressionInfo, TensorRole
from hivemind.p2p import PeerID
from hivemind.utils import get_logger

from hivenb.engine.exchange.all_gather import AllGather, suits_all_gather
from hivenb.engine.exchange.part_messages import encoded
from hivenb.engine.exchange.runner import FaultTolerantRunner
from hivenb.engine.exchange.sending import SendingRate
from hivenb.engine.matchmaking.group_records import is_far, is_helper, is_marked
from hivenb.engine.matchmaking.matchmaking import EpochMatchmaking
from hivenb.engine.trust.aggregation import SampleReports, SenderWeights, UsualNorms
from hivenb.engine.trust.reliability import ExchangeNotes

logger = get_logger(__name__)

#: Seconds between two lines in the log on one peer that is refused in each round.
SAY_AGAIN_AFTER = 60.0

#: Seconds of an exchange from which on its bytes count for more than the length of the line.
LONG_EXCHANGE = 0.5

#: Exchanges of which the quickest one is not of a busy moment.
_ENOUGH = 3


@dataclass(frozen=True)
class RoundTerms:
    """How a group exchanges in a round, and what was seen of its peers meanwhile.

    :param are_of_ours: whether nobody in it is a peer of plain hivemind
    :param has_helper: whether somebody only helps the others to average
    :param are_far: whether the lines of all in it are long, as they say
    :param notes: of its exchanges, of which a round may have several
    """

    are_of_ours: bool
    has_helper: bool
    are_far: bool = False
    notes: ExchangeNotes = field(default_factory=ExchangeNotes)

    @classmethod
    def of(cls, records: Sequence[list[Any]]) -> RoundTerms:
        """Those of a group.

        :param records: what its peers say of themselves
        """
        return cls(all(map(is_marked, records)), any(map(is_helper, records)), all(map(is_far, records)))


class GroupExchange:
    """What an averager's process knows, from round to round, of those with whom it exchanges, and of its own line."""

    def __init__(self) -> None:
        self._usual_norms = UsualNorms()
        #: when something was last said of a peer
        self._said_at: dict[PeerID, float] = {}
        self._sender_weights = SenderWeights()
        self._sending_rate = SendingRate()
        #: seconds of the latest exchanges
        self._seconds: deque[float] = deque(maxlen=_ENOUGH)
        #: of rounds that are over here, what others still are to have of them
        self._endings: set[asyncio.Task[None]] = set()

    @property
    def takes_long(self) -> bool:
        """Whether exchanges took long of late: what is sent is much for the line, or peers wait for each other."""
        return len(self._seconds) == _ENOUGH and min(self._seconds) >= LONG_EXCHANGE

    @property
    def megabits(self) -> float | None:
        """What this peer's line can send in a second, as its rounds show it; ``None`` if that is not known."""
        return self._sending_rate.megabits

    def note_reports(self, reports: SampleReports) -> None:
        """Let senders count for no more than this."""
        self._sender_weights.note(reports)

    def note_ending(self, ending: asyncio.Task[None]) -> None:
        """Know of what others still are to have of a round that is over here."""
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    async def end(self, timeout: float | None) -> None:
        """Let others have what they still are to have of rounds that are over here.

        :param timeout: seconds after which whoever has not taken it goes without
        """
        if self._endings:
            await asyncio.wait(self._endings, timeout=timeout)

    @contextlib.asynccontextmanager
    async def watched(self, matchmaking: EpochMatchmaking, group: GroupInfo, terms: RoundTerms) -> AsyncIterator[None]:
        """Look at the line and at the others as long as a group exchanges, and tell what they have done then."""
        began = time.monotonic()
        try:
            async with self._sending_rate.watched():
                yield
        finally:
            overstating = partial(self._sender_weights.overstating, terms.notes.claimed)
            seconds = time.monotonic() - began
            self._seconds.append(seconds)
            matchmaking.note_exchange(group, terms.notes, overstating, seconds)
            self.log_what_was_not_taken(terms.notes)

    def log_what_was_not_taken(self, notes: ExchangeNotes) -> None:
        """Say of whom something was refused, once in a while of each."""
        for peer, line in notes.lines(self._sender_weights.implausible(notes.claimed)).items():
            if time.monotonic() - self._said_at.get(peer, -math.inf) >= SAY_AGAIN_AFTER:
                self._said_at[peer] = time.monotonic()
                logger.warning(line)

    def runner(
        self, matchmaking: EpochMatchmaking, tensors: Sequence[torch.Tensor], terms: RoundTerms, **settings: Any
    ) -> FaultTolerantRunner:
        """What exchanges tensors with a group.

        :param matchmaking: which knows who has gone
        :param tensors: to be averaged
        :param settings: of :class:`~hivenb.engine.exchange.runner.FaultTolerantRunner`, but for ``usual``; with
          ``weights_are_samples``, whether a sender may weigh no more than it has reported
        """
        are_samples, own_id = settings.pop("weights_are_samples"), settings["p2p"].peer_id
        # hivemind/averaging/partition.py cuts what lies in memory in the order of its indices, which with
        # torch.channels_last it does not; others are sent that order whatever the layout is here
        in_order = [tensor.contiguous() for tensor in tensors]
        # a helper, which has nothing to send, exchanges as with plain hivemind
        exchange_alike = terms.are_of_ours and not terms.has_helper
        is_gathered = suits_all_gather(settings["peer_fractions"], in_order, exchange_alike, terms.are_far)
        return (AllGather if is_gathered else FaultTolerantRunner)(
            matchmaking=matchmaking,
            tensors=in_order,
            usual=self._usual_norms,
            largest_weights=partial(self._largest_weights, own_id) if are_samples else _one_each,
            **settings,
        )

    def _largest_weights(self, own_id: PeerID, senders: Sequence[PeerID]) -> list[float]:
        return self._sender_weights.largest(senders, own_id)


def _one_each(senders: Sequence[PeerID]) -> list[float]:
    return [1.0] * len(senders)


# -- tensor parts ----------------------------------------------------------------------------------------------------


class PartCodec(CompressionBase):
    """Another codec, as the parts of a round are cut and encoded by it.

    hivemind cuts each tensor into parts of 512 KiB *after* compression (``averaging/partition.py``,
    ``TensorPartContainer``), so where it cuts depends on the codec. Peers with different codecs then expect different
    parts of each other, and every round with a tensor of more than 131,072 numbers fails.

    :param role: of the tensors that have none
    :param are_of_ours: whether the group has no peer of plain hivemind; tensors are then cut as without a codec
    """

    def __init__(self, codec: CompressionBase, role: TensorRole, are_of_ours: bool):
        self._codec, self._role, self._are_of_ours = codec, role, are_of_ours

    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> Any:
        if self._are_of_ours and info.role is TensorRole.UNSPECIFIED:
            info = dataclasses.replace(info, role=self._role)
        return encoded(self._codec, tensor, info)

    def extract(self, serialized_tensor: Any) -> torch.Tensor:
        return self._codec.extract(serialized_tensor)

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        return 1.0 if self._are_of_ours else self._codec.estimate_compression_ratio(info)
