"""All-reduce that waits for nobody who has gone, and says who has taken part."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.compression import CompressionBase, CompressionInfo, TensorRole
from hivemind.optim.grad_averager import GradientAverager
from hivemind.p2p import PeerID
from hivemind.utils import get_logger

from hivenb.engine.exchange.pace import SendingRate
from hivenb.engine.exchange.runner import AllGather, FaultTolerantRunner, suits_all_gather
from hivenb.engine.matchmaking.group_records import UPSTREAM_FIELDS, are_of_ours, has_helper, with_bandwidth
from hivenb.engine.matchmaking.matchmaking import EpochMatchmaking
from hivenb.engine.trust.aggregation import NORM_BOUND, Gathered, SampleReports, SenderWeights, UsualNorms
from hivenb.engine.trust.conduct import ExchangeNotes

logger = get_logger(__name__)

#: Seconds between two lines in the log on one peer that is refused in each round.
SAY_AGAIN_AFTER = 60.0


class FaultTolerantAllReduce(DecentralizedAverager):
    """Mixin to put *before* a class of hivemind's averagers: a peer that dies costs its part, and no time."""

    _matchmaking: EpochMatchmaking

    def __init__(self, *args: Any, robust_aggregation: str = NORM_BOUND, **kwargs: Any):
        #: the rule by which what is finite is averaged
        self.robust_aggregation = robust_aggregation
        self._usual_norms = UsualNorms()
        #: when something was last said of a peer
        self._said_at: dict[PeerID, float] = {}
        self._sender_weights = SenderWeights()
        self._sending_rate = SendingRate()
        super().__init__(*args, **kwargs)

    def note_reports(self, reports: SampleReports) -> None:
        """Let senders count for no more than this. In the process that trains, on any thread."""
        self._outer_pipe.send(("_note_reports", [reports], {}))

    async def _note_reports(self, reports: SampleReports) -> None:
        self._sender_weights.note(reports)

    def _largest_weights(self, senders: Sequence[PeerID]) -> list[float]:
        return self._sender_weights.largest(senders, self.peer_id)

    async def _step(self, *, step: StepControl, future_for_init: Any) -> None:
        step._data_for_gather = with_bandwidth(step.data_for_gather, self._sending_rate.megabits)
        await super()._step(step=step, future_for_init=future_for_init)

    @contextlib.contextmanager
    def _register_allreduce_group(self, group_info: GroupInfo) -> Iterator[None]:
        with super()._register_allreduce_group(group_info):
            self._matchmaking.begin(group_info.group_id)
            yield

    async def _aggregate_with_group(self, group_info: GroupInfo, min_vector_size: int, **kwargs: Any) -> Any:
        notes = self._notes = ExchangeNotes()
        # a helper, which has nothing to send, exchanges as with plain hivemind
        kwargs["are_of_ours"] = are_of_ours(group_info.gathered) and not has_helper(group_info.gathered)
        began = time.monotonic()
        try:
            async with self._sending_rate.watched():
                gathered = await super()._aggregate_with_group(group_info, min_vector_size, **kwargs)
        finally:
            overstating = partial(self._sender_weights.overstating, notes.claimed)
            self._matchmaking.note_exchange(group_info, notes, overstating, time.monotonic() - began)
            self._log_what_was_not_taken(notes)
        reached = {peer: value for peer, value in gathered.items() if peer not in notes.unreached}
        return Gathered(reached, notes.refused)

    def _log_what_was_not_taken(self, notes: ExchangeNotes) -> None:
        for peer, line in notes.lines(self._sender_weights.implausible(notes.claimed)).items():
            if time.monotonic() - self._said_at.get(peer, -math.inf) >= SAY_AGAIN_AFTER:
                self._said_at[peer] = time.monotonic()
                logger.warning(line)

    async def _run_allreduce_inplace_(
        self, tensors: Sequence[torch.Tensor], group_info: GroupInfo, group_id: bytes | None = None, **kwargs: Any
    ) -> None:
        # Replaces hivemind/averaging/averager.py:_run_allreduce_inplace_, which makes a runner of hivemind's own class
        group = dataclasses.replace(group_info, group_id=group_id or group_info.group_id)
        # hivemind/averaging/partition.py cuts what lies in memory in the order of its indices, which with
        # torch.channels_last it does not; others are sent that order whatever the layout is here
        kwargs["phase"] = group.group_id[len(group_info.group_id) :]
        runner = self._runner_of(group, [tensor.contiguous() for tensor in tensors], kwargs)
        self._running_groups[group.group_id].set_result(runner)  # for those who send their parts
        try:
            await runner.average_into(tensors, self._averaging_alpha)
        finally:
            self._notes.take_in(runner.notes)

    def _runner_of(
        self, group: GroupInfo, tensors: Sequence[torch.Tensor], settings: Mapping[str, Any]
    ) -> FaultTolerantRunner:
        own = {"p2p": self._p2p, "prefix": self.prefix, "servicer_type": type(self), "matchmaking": self._matchmaking}
        own |= {"rule": self.robust_aggregation, "usual": self._usual_norms, "largest_weights": self._largest_weights}
        own |= {"group_id": group.group_id, "ordered_peer_ids": group.peer_ids, "tensors": tensors}
        settings = dict(settings)
        are_ours = settings.pop("are_of_ours", False)
        is_gathered = suits_all_gather(settings["peer_fractions"], tensors, are_ours)
        return (AllGather if is_gathered else FaultTolerantRunner)(**own, **settings)


# -- tensor parts ----------------------------------------------------------------------------------------------------
#
# Cuts tensors alike in a group of hivenb's peers, whatever codec each of them has chosen.
#
# hivemind cuts each tensor into parts of 512 KiB *after* compression (``averaging/partition.py``,
# ``TensorPartContainer``), so where it cuts depends on the codec. Peers with different codecs then expect different
# parts of each other, and every round with a tensor of more than 131,072 numbers fails.


class PartsCutAlike(DecentralizedAverager):
    """Mixin to put *before* a class of hivemind's averagers.

    A group of hivenb's peers alone cuts its tensors as if they were not compressed; one with a peer of plain hivemind
    in it, as that one does: they need the same codec then.
    """

    async def _aggregate_with_group(self, group_info: GroupInfo, min_vector_size: int, **kwargs: Any) -> Any:
        if are_of_ours(group_info.gathered):
            # hivemind names no role for gradients, so RoleAdaptiveCompression would take them for anything else
            role = TensorRole.GRADIENT if isinstance(self, GradientAverager) else TensorRole.UNSPECIFIED
            kwargs["compression"] = _CutUncompressed(kwargs["compression"], role)
        records = map(self.serializer.loads, group_info.gathered)
        known = tuple(self.serializer.dumps(record[:UPSTREAM_FIELDS]) for record in records)
        group_info = dataclasses.replace(group_info, gathered=known)
        return await super()._aggregate_with_group(group_info, min_vector_size, **kwargs)


class _CutUncompressed(CompressionBase):
    """Another codec, all but the estimate by which tensors are cut.

    :param role: of the tensors that have none
    """

    def __init__(self, codec: CompressionBase, role: TensorRole):
        self._codec, self._role = codec, role

    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> Any:
        if info.role is TensorRole.UNSPECIFIED:
            info = dataclasses.replace(info, role=self._role)
        return self._codec.compress(tensor, info, allow_inplace=allow_inplace)

    def extract(self, serialized_tensor: Any) -> torch.Tensor:
        return self._codec.extract(serialized_tensor)

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        return 1.0
