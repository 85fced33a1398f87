"""How a peer leaves a group, and how those in it learn of that, so that nobody waits for its data."""

from __future__ import annotations

import asyncio
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind tells a stream by typing's own class

from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import StepControl
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import get_logger
from hivemind.utils.asyncio import achain, as_aiter

from hivenb.engine.rounds import given_up_search
from hivenb.engine.rounds.matchmaking import EpochMatchmaking
from hivenb.engine.rounds.stream_ends import CLOSED_WITHIN, left_open

logger = get_logger(__name__)


class LeavingAverager(DecentralizedAverager):
    """``hivemind``'s averager that says so when it leaves a group, and waits for nobody who has."""

    _matchmaking: EpochMatchmaking

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        # hivemind/averaging/averager.py:rpc_aggregate_part turns away whoever is quicker than this peer if the round
        # before the present one has ended since that was agreed on: with rounds in the background, as good as always
        request = await anext(stream)
        if given_up_search.is_given_up(request):
            answer = given_up_search.answer(self._matchmaking.let_go(context.remote_id))
            async for message in left_open(as_aiter(answer), CLOSED_WITHIN, lambda _: True):
                yield message
            return
        if request.code == averaging_pb2.CANCELLED:
            self._matchmaking.decline(request.group_id, context.remote_id)
            return
        takes_part = await self._matchmaking.wait_for_trigger(request.group_id)
        if request.group_id not in self._running_groups:
            if not takes_part or not self._matchmaking.is_looking_for_group:
                # it has left the group, maybe before it learned that it was in one
                await self._decline(request.group_id, context.remote_id)
                yield averaging_pb2.AveragingData(code=averaging_pb2.BAD_GROUP_ID)
                return
            await self._pending_groups_registered.wait()
        if (group := self._running_groups.get(request.group_id)) is not None:
            # hivemind awaits the future itself, which is cancelled, for all, with the request of a sender that dies
            await asyncio.wait({group})
        async for message in super().rpc_aggregate_part(achain(as_aiter(request), stream), context):
            yield message

    async def _step(self, *, step: StepControl, future_for_init: Any) -> None:
        try:
            await super()._step(step=step, future_for_init=future_for_init)
        finally:
            left = await self._matchmaking.leave(step)
            await asyncio.gather(*(self._decline(group.group_id, peer) for group in left for peer in group.peer_ids))

    async def _decline(self, group_id: bytes, peer: PeerID) -> None:
        """Tell a peer that this one does not average with a group that it was in, so that nobody waits for its data.

        hivemind's peers understand that, too.
        """
        if peer == self.peer_id:
            return
        message = averaging_pb2.AveragingData(code=averaging_pb2.CANCELLED, group_id=group_id)
        try:
            stub = self.get_stub(self._p2p, peer, namespace=self.prefix)
            async for _ in await stub.rpc_aggregate_part(as_aiter(message)):
                break
        except given_up_search.UNREACHABLE as e:
            logger.debug(f"{peer} could not be told that this peer has left a group: {e!r}")
