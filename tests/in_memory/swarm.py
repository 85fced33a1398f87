"""A swarm in one event loop: real averagers, trackers and hosts of hivenb, over lines in memory, by a clock that jumps.

Of each averager that runs which otherwise has a process of its own: its matchmaking, its rounds and what it answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from hivemind.averaging.control import AveragingStage, StepControl
from hivemind.p2p import PeerID
from hivemind.utils import MPFuture

from hivenb.engine.averaging.gradient_averager import GradientAverager
from hivenb.engine.averaging.round import Round
from hivenb.engine.exchange import codecs, sending
from hivenb.engine.matchmaking.matchmaking import Attendance, EpochMatchmaking, ExpectedPeers
from hivenb.engine.network.untrusted_values import bound_this_process
from hivenb.engine.progress.tracker import ProgressTracker
from hivenb.swarm.agreement.host import Hosting
from in_memory.clock import VirtualLoop, spawn, told_by
from in_memory.network import Network
from in_memory.records import InMemoryDHT, SharedRecords
from in_memory.serving import begin_serving

# as in each averager's process
bound_this_process()
codecs.install()

#: The run that all take part in.
RUN = "run"

#: Of averagers: those of an options' default, and deadlines that a round waits for only if something is wrong.
SETTINGS: dict[str, Any] = {
    "min_matchmaking_time": 5.0,
    "request_timeout": 2.0,
    "next_chunk_timeout": 300.0,
    "allreduce_timeout": 600.0,
}


class _Pipe:
    """In place of the one to an averager's process: what is asked for begins in the loop."""

    def __init__(self, peer: InMemoryPeer):
        self._peer = peer

    def send(self, message: tuple[str, Sequence[Any], dict[str, Any]]) -> None:
        method, args, kwargs = message
        spawn(self._peer.tasks, getattr(self._peer.averager, method)(*args, **kwargs))


class InMemoryPeer:
    """One of the swarm."""

    averager: GradientAverager
    tracker: ProgressTracker

    def __init__(self, number: int, swarm: InMemorySwarm, initial_peers: Sequence[str] = ()):
        self.number, self._swarm = number, swarm
        self.dht: Any = InMemoryDHT(number, swarm.network, swarm.records, initial_peers)
        self.dht.loop = swarm.loop
        self.peer_id: PeerID = self.dht.peer_id
        self.tasks = swarm.network.hosts[self.peer_id].tasks
        self.rounds: list[Round] = []

    def __repr__(self) -> str:
        return f"peer {self.number}"

    @property
    def id(self) -> bytes:
        return self.peer_id.to_bytes()

    @property
    def matchmaking(self) -> EpochMatchmaking:
        return self.averager._matchmaking

    def do(self, coroutine: Any) -> asyncio.Task[Any]:
        """Begin something that ends with this peer."""
        return spawn(self.tasks, coroutine)

    def die(self) -> None:
        self._swarm.network.kill(self.peer_id)

    # -- rounds -------------------------------------------------------------------------------------------------

    async def average_with(
        self, shape: int | tuple[int, ...] = 3, kind: Callable[..., GradientAverager] = GradientAverager, **options: Any
    ) -> None:
        """Have an averager of the gradients of one parameter."""
        parameters = [torch.nn.Parameter(torch.zeros(shape))]
        made = kind(parameters, dht=self.dht, prefix=RUN, start=False, **{**SETTINGS, **options})
        made._inner_pipe.send(("_SHUTDOWN", None))  # nobody asks its thread for a state
        made._outer_pipe = _Pipe(self)
        self.averager = made
        self._swarm.to_close.append(made._inner_pipe)
        if isinstance(made, GradientAverager):
            self._swarm.to_close += [made._round_reports._in, made._round_reports._out]
        await self.do(begin_serving(made))

    async def search(
        self,
        value: float | None = None,
        *,
        epoch: Any = 1,
        weight: float = 1.0,
        timeout: float = 120.0,
        waits: bool = False,
        allow_retries: bool = True,
    ) -> Round:
        """Begin a round of averaging.

        :param value: of all its numbers; as they are by default
        :param weight: with which they count
        :param waits: whether it waits for a trigger when it has a group
        """
        # as hivemind/averaging/averager.py:step, which waits for another process
        own, now = self.averager, self._swarm.loop.dht_time()
        gathered = own.serializer.dumps([own.bandwidth, own.mode.value, own.serializer.dumps(epoch)])
        control = StepControl(
            scheduled_time=now + own.matchmaking_kwargs["min_matchmaking_time"],
            deadline=now + timeout,
            allow_retries=allow_retries,
            weight=weight,
            data_for_gather=gathered,
        )
        if value is not None:
            self.put_in(value)
        attached: MPFuture[Any] = MPFuture()
        self.do(own._step(step=control, future_for_init=attached))
        await attached
        made = Round.of(control, epoch)
        self.rounds.append(made)
        if isinstance(own, GradientAverager):
            own._rounds.add(made)
        if not waits:
            made.allow_allreduce()
        return made

    def begin(self, control: Round, value: float) -> None:
        """Let a round begin that waits for its trigger, with such numbers."""
        self.put_in(value)
        control.allow_allreduce()

    def put_in(self, value: float) -> None:
        with self.averager.get_tensors() as (gradient,):
            gradient.fill_(value)

    @property
    def numbers(self) -> torch.Tensor:
        """What it has now."""
        with self.averager.get_tensors() as (gradient,):
            return gradient.clone()

    # -- progress and agreement ---------------------------------------------------------------------------------

    async def track(self, **kwargs: Any) -> ProgressTracker:
        """Follow the progress of a run with 100 samples in an epoch."""
        self.dht.know_run(RUN)

        def make() -> ProgressTracker:
            return ProgressTracker(self.dht, RUN, 100, private_key=self.dht.private_key, start=False, **kwargs)

        self.tracker = await self._swarm.in_thread(make)
        self.tracking = self.do(self._follow())
        return self.tracker

    async def _follow(self) -> None:
        # as its method run, in a thread of its own
        try:
            await self.tracker._report_and_fetch()
        finally:
            self.tracker.shutdown_complete.set()

    def host(self, peers: Callable[[], Sequence[Any]] = tuple, may_host: bool = True) -> Hosting:
        """Take part in agreeing on options; its methods are to be called in threads."""
        return Hosting(self.dht, peers, RUN, may_host)


class InMemorySwarm:
    """Peers of one event loop, none at first."""

    def __init__(self, loop: VirtualLoop):
        self.loop = loop
        self.network = Network()
        self.records = SharedRecords(self.network)
        self.records.know_run(RUN)
        self.peers: list[InMemoryPeer] = []
        #: descriptors, which garbage would hold until it is looked for
        self.to_close: list[Any] = []

    async def join(self, count: int = 1, initial_peers: Sequence[str] = ()) -> list[InMemoryPeer]:
        """Let some more come."""
        came = [InMemoryPeer(len(self.peers) + number, self, initial_peers) for number in range(1, count + 1)]
        self.peers += came
        for peer in came:
            await peer.dht.open()
        return came

    async def join_with_averagers(self, count: int, *args: Any, **options: Any) -> list[InMemoryPeer]:
        """Let some more come, each with an averager."""
        came = await self.join(count)
        for peer in came:
            await peer.average_with(*args, **options)
        return came

    def expect_each_other(self, *peers: InMemoryPeer, epoch: int = 1) -> None:
        """Let averagers know that all of them are at an epoch, as their trackers would."""
        there = {peer: Attendance(peer.id, 0, epoch) for peer in peers}
        for peer in peers:
            others = frozenset(one for other, one in there.items() if other is not peer)
            peer.averager.expect_peers(ExpectedPeers(others))

    async def in_thread(self, func: Callable[..., Any], *args: Any) -> Any:
        """Call what waits for the DHT."""
        return await self.loop.run_in_executor(None, func, *args)

    async def until(self, condition: Callable[[], object], seconds: float = 60.0) -> None:
        """Wait, with a bound, until something holds."""
        end = self.loop.time() + seconds
        while not condition():
            assert self.loop.time() < end, f"did not happen within {seconds:.0f} s"
            await asyncio.sleep(0.01)

    async def meet(self, *peers: InMemoryPeer) -> list[Round]:
        """Rounds of peers that have met, and wait for their triggers."""
        self.expect_each_other(*peers)
        rounds = [await peer.search(waits=True) for peer in peers]
        await self.until(lambda: all(map(has_met, rounds)))
        return rounds

    @property
    def now(self) -> float:
        """Seconds of the test's clock."""
        return self.loop.time()


async def outcome(control: Round, seconds: float = 120.0) -> Any:
    """What comes of a round."""
    loop = asyncio.get_running_loop()
    over = loop.create_future()
    control.add_done_callback(lambda _: over.done() or over.set_result(None))
    await asyncio.wait_for(over, seconds)
    return control.result(0)


def has_met(control: Round) -> bool:
    """Whether a round has a group, and waits for its trigger."""
    return control.stage is AveragingStage.AWAITING_TRIGGER


@contextlib.contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """It takes longer than a test, comes at any moment of it, and ends what others have left behind."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def opened() -> Iterator[InMemorySwarm]:
    """A swarm and its loop, for one test."""
    loop = VirtualLoop()
    drawn = random.getstate()
    random.seed(0)
    asyncio.set_event_loop(loop)
    try:
        # what the machine sends says nothing of lines in memory
        with told_by(loop), patch.object(sending, "bytes_sent", dict), _nothing_shared(), _no_garbage_collected():
            swarm = _in_loop(loop)
            try:
                yield swarm
            finally:
                loop.run_until_complete(_end(swarm))
                for one in swarm.to_close:
                    one.close()
    finally:
        loop.close()
        asyncio.set_event_loop(None)
        random.setstate(drawn)


def _in_loop(loop: VirtualLoop) -> InMemorySwarm:
    async def make() -> InMemorySwarm:
        return InMemorySwarm(loop)

    return loop.run_until_complete(make())


def _nothing_shared() -> Any:
    """Nothing is for another process, and to share it takes longer than all that a test does."""
    return patch.object(torch.Tensor, "share_memory_", lambda tensor: tensor)


async def _end(swarm: InMemorySwarm) -> None:
    for peer in swarm.peers:
        for control in peer.rounds:
            control.cancel()  # else it would be tried again
        peer.die()
    for _ in range(10):  # what ends may begin something
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if not others:
            return
        for task in others:
            task.cancel()
        await asyncio.wait(others, timeout=60.0)
