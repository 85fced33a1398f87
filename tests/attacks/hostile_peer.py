"""Members of a run that waste the others' time, each in a process of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind tells a stream by typing's own class

import forked
import tiny
import torch
from hivemind.p2p import P2P, P2PContext
from hivemind.proto import averaging_pb2

import hivenb
from hivenb.engine.averaging.averager import Averager
from hivenb.engine.exchange.runner import FaultTolerantRunner
from hivenb.engine.matchmaking.matchmaking import EpochMatchmaking
from hivenb.engine.progress.tracker import ProgressTracker

#: Seconds after which a process of these ends in any case.
_LONGEST = 300.0


def start(deed: Callable[..., None], *args: Any) -> BaseProcess:
    """Start one.

    :param deed: one of the functions below
    """
    return forked.start(deed, *args)


def list_itself(invite: str, run_id: str) -> None:
    """Be on the list of a run, always at the newest epoch, and come to no round."""
    with hivenb.Swarm.join(invite) as swarm:
        tracker = ProgressTracker(
            swarm.dht, run_id, 64, private_key=swarm.dht.private_key, start=True, default_refresh_period=1.0
        )
        for _ in range(int(_LONGEST / 0.3)):
            tracker.report_local_progress(tracker.global_progress.epoch, 0)
            time.sleep(0.3)


def claim_an_epoch(invite: str, run_id: str) -> None:
    """Be on the list of a run, at an epoch that nobody has reached, and have no state of it."""
    with hivenb.Swarm.join(invite) as swarm:
        tracker = ProgressTracker(swarm.dht, run_id, 64, private_key=swarm.dht.private_key, start=True)
        for _ in range(int(_LONGEST / 0.3)):
            tracker.report_local_progress(10**9, 1)
            time.sleep(0.3)


def train_and(change: Callable[[], None], invite: str, options: dict[str, Any]) -> None:
    """Train with the others as everybody does, but for one thing.

    :param change: changes hivenb in this process, before anything is started
    :param options: of the run
    """
    torch.set_num_threads(1)
    change()
    with hivenb.Swarm.join(invite) as swarm:
        run = hivenb.TrainingRun(
            tiny.PacedModel(),
            tiny.loader(4096),
            swarm=swarm,
            options=hivenb.Options(**options),
            accelerator="cpu",
        )
        run.start()
        time.sleep(_LONGEST)


def send_nothing() -> None:
    """In rounds, have no part for anybody."""

    async def silent(self: Any, peer_index: int) -> AsyncIterator[Any]:
        await asyncio.sleep(_LONGEST)
        yield

    FaultTolerantRunner._generate_input_for_peer = silent  # type: ignore[method-assign]


def stall_by_turns() -> None:
    """In each second round, have no part for anybody."""
    honest = FaultTolerantRunner._generate_input_for_peer
    is_silent: dict[bytes, bool] = {}

    async def by_turns(self: Any, peer_index: int) -> AsyncIterator[Any]:
        if is_silent.setdefault(self.group_id, len(is_silent) % 2 == 1):
            await asyncio.sleep(_LONGEST)
        async for message in honest(self, peer_index):
            yield message

    FaultTolerantRunner._generate_input_for_peer = by_turns  # type: ignore[method-assign]


def trickle() -> None:
    """In rounds, send a byte now and then."""

    async def slowly(data: bytes, writer: asyncio.StreamWriter, **kwargs: Any) -> None:
        is_part = len(data) > 64
        writer.write(len(data).to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER))
        for number in range(len(data)):
            writer.write(data[number : number + 1])
            if is_part:
                await writer.drain()
                await asyncio.sleep(0.5)
        await writer.drain()

    P2P.send_raw_data = staticmethod(slowly)  # type: ignore[method-assign]


def never_average() -> None:
    """In rounds, take the others' parts, and answer nothing."""

    async def silent(
        self: Any, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        await asyncio.sleep(_LONGEST)
        yield averaging_pb2.AveragingData()

    Averager.rpc_aggregate_part = silent  # type: ignore[method-assign]


def never_begin() -> None:
    """Be the first that looks for a group, let the others in, and do not begin."""

    async def silent(self: Any, request: Any, context: Any) -> AsyncIterator[Any]:
        yield averaging_pb2.MessageFromLeader(code=averaging_pb2.ACCEPTED)
        await asyncio.sleep(_LONGEST)

    EpochMatchmaking.rpc_join_group = silent  # type: ignore[method-assign]


def report_samples() -> None:
    """Train as the others do, and report an epoch's samples after the first batch of each."""
    honest = ProgressTracker._get_local_progress

    def report(self: ProgressTracker, local_epoch: int, samples_accumulated: int) -> Any:
        return honest(self, local_epoch, samples_accumulated and self.target_batch_size)

    ProgressTracker._get_local_progress = report  # type: ignore[method-assign]


def nothing() -> None:
    """Change nothing."""
