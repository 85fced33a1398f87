"""One of two peers, on a line that is slow in one direction: what it has is sent long after it has the other's."""

from __future__ import annotations

import asyncio
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind tells a stream by typing's own class

from hivemind.proto import averaging_pb2

from hivenb.engine.averaging.gradient_averager import GradientAverager
from hivenb.engine.exchange.all_gather import AllGather
from hivenb.engine.exchange.runner import FaultTolerantRunner


class SlowExchange(AllGather):
    """Has the other one's numbers long before it has sent its own."""

    async def _generate_input_for_peer(self, peer_index: int) -> AsyncIterator[averaging_pb2.AveragingData]:
        async for message in super()._generate_input_for_peer(peer_index):
            yield message
            await asyncio.sleep(0.1)


class SlowSender(GradientAverager):
    """Sends like this."""

    def _runner_of(self, *args: Any, **settings: Any) -> FaultTolerantRunner:
        runner = super()._runner_of(*args, **settings)
        assert type(runner) is AllGather
        runner.__class__ = SlowExchange
        return runner
