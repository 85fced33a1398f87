"""A swarm in memory for whoever blocks a thread, as an optimizer does: in real time, in a loop on a thread of its own.

Averagers are the real ones but for their process: what it would do is done in that loop. So nothing here tells what a
fork copies, nor what a pipe or shared memory does.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
import weakref
from collections.abc import Coroutine, Iterator
from typing import Any
from unittest.mock import patch

import torch
from hivemind.averaging.averager import _background_thread_fetch_current_state
from hivemind.averaging.control import StepControl
from hivemind.compression import serialization
from hivemind.p2p import PeerID
from hivemind.utils import MPFuture, MSGPackSerializer
from hivemind.utils.mpfuture import SharedBytes

from hivenb.engine.averaging.averager import Averager
from hivenb.engine.exchange import codecs, sending
from hivenb.engine.network.untrusted_values import bound_this_process
from hivenb.engine.process.child import prepare_answers
from in_memory.clock import OwningLoop, spawn
from in_memory.network import Network
from in_memory.records import InMemoryDHT, SharedRecords
from in_memory.serving import begin_serving

#: Seconds that anything may take which is not waited for on purpose.
PATIENCE = 30.0

#: Threads in which all averagers compute and wait for locks; each has some of its own otherwise.
_THREADS = 32


class _Answer(concurrent.futures.Future):
    """What the loop brings about, to be waited for on any thread or in any loop."""

    def __await__(self) -> Any:
        return asyncio.wrap_future(self).__await__()


class RealTimeDHT(InMemoryDHT):
    """A peer's part in the swarm, to be used from threads."""

    def __init__(self, number: int, swarm: RealTimeSwarm, *args: Any, client_mode: bool = False):
        super().__init__(number, swarm.network, swarm.records, *args)
        self.swarm, self.loop, self.client_mode = swarm, swarm.loop, client_mode
        self._network = swarm.network

    async def replicate_p2p(self) -> Any:
        made = self._network.p2p_of(self.peer_id)
        made._daemon_listen_maddr = made._client_listen_maddr = ""  # nobody has to be told that it has ended
        return made

    def _begin(self, coroutine: Any, return_future: bool) -> Any:
        answer = _Answer()
        self.loop.call_soon_threadsafe(self._run, coroutine, answer)
        return answer if return_future else answer.result(PATIENCE)


class _Step(StepControl):
    """A round that both sides of an averager hold, which are one process here."""

    def attach(self, trigger: MPFuture[Any], cancel: MPFuture[Any]) -> None:
        self._trigger, self._cancel = trigger, cancel


class _Served:
    """In place of the process of an averager, and of the pipe that leads into it."""

    ended: Exception | None = None
    pid = None
    exitcode: int | None = None

    def __init__(self, averager: Any):
        self._averager, self._loop = averager, averager.dht.loop
        self.tasks: set[asyncio.Task[Any]] = set()
        self._has_ended = threading.Event()

    def __repr__(self) -> str:
        return f"{type(self._averager).__name__} of {self._averager.prefix}"

    # -- as multiprocessing's process ---------------------------------------------------------------------------

    def poll(self) -> int | None:
        return 0 if self._has_ended.is_set() else None

    def wait(self, timeout: float | None = None) -> int | None:
        self._has_ended.wait(timeout)
        return self.poll()

    # -- as the pipe --------------------------------------------------------------------------------------------

    def send(self, message: tuple[str, Any, dict[str, Any]]) -> None:
        method, args, kwargs = message
        for value in kwargs.values():
            if isinstance(value, MPFuture):
                value._loop = value._aio_event = None  # nobody awaits it on this side
            if isinstance(value, StepControl):
                value.__class__ = _Step
        if method == "_shutdown":
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(PATIENCE)
        else:
            self._loop.call_soon_threadsafe(self._begin, method, args, kwargs)

    def _begin(self, method: str, args: Any, kwargs: dict[str, Any]) -> None:
        if not self._has_ended.is_set():
            spawn(self.tasks, getattr(self._averager, method)(*args, **kwargs))

    # -- in the loop --------------------------------------------------------------------------------------------

    async def begin(self) -> None:
        own = self._averager
        await begin_serving(own)
        if not own.client_mode:
            spawn(self.tasks, own._declare_for_download_periodically())
        own._ready.set_result(None)

    async def _end(self) -> None:
        own = self._averager
        if not own.client_mode:
            await own.remove_p2p_handlers(own._p2p, namespace=own.prefix)
        for group in own._running_groups.values():
            if group.done() and not group.cancelled():
                group.result().finalize(cancel=True)
        for task in list(self.tasks):
            task.cancel()
        if self.tasks:
            await asyncio.wait(set(self.tasks), timeout=own.shutdown_timeout)
        self._has_ended.set()


class _ToHost:
    """In place of the pipe by which the process of an averager asks for the state; nothing is pickled."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.send, self.recv = self._messages.put, self._messages.get


def _serve(averager: Any) -> None:
    """In place of ``Averager.start``."""
    assert isinstance(averager.dht, RealTimeDHT), "no process can be started meanwhile: nothing is shared with it"
    served, asked = _Served(averager), _ToHost()
    averager._inner_pipe.send(("_SHUTDOWN", None))  # the thread that reads what is pickled
    for end in (averager._inner_pipe, averager._outer_pipe):
        averager.dht.swarm.to_close.append(end)
    averager._inner_pipe, averager._outer_pipe, averager._popen = asked, served, served
    averager.dht.swarm.served.append(served)
    state = weakref.WeakMethod(averager.get_current_state)
    threading.Thread(
        target=_background_thread_fetch_current_state, args=(averager.serializer, asked, state), daemon=True
    ).start()
    averager._ready._loop = averager._ready._aio_event = None
    averager.dht.loop.call_soon_threadsafe(spawn, served.tasks, served.begin())


class RealTimeSwarm:
    """Peers of one process."""

    network: Network
    records: SharedRecords

    def __init__(self) -> None:
        self.loop = OwningLoop()
        self.loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(_THREADS))
        self._thread = threading.Thread(target=self.loop.run_forever, name="swarm-in-memory", daemon=True)
        self._thread.start()
        self._count = 0
        self.to_close: list[Any] = []
        #: what stands for the processes of averagers
        self.served: list[_Served] = []
        self.call(self._begin())

    async def _begin(self) -> None:
        self.network = Network()
        self.network.latency, self.network.jitter = 0.001, 0.0
        self.records = SharedRecords(self.network)

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Do something in the loop, and wait for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE)

    def join(self, *initial_peers: str, client_mode: bool = False) -> RealTimeDHT:
        """Let one more come."""
        self._count += 1

        async def come() -> RealTimeDHT:
            made = RealTimeDHT(self._count, self, initial_peers, client_mode=client_mode)
            await made.open()
            return made

        return self.call(come())

    def close(self) -> None:
        """End all that goes on still."""
        self.call(self._end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE)
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        for one in self.to_close:
            one.close()
        left = [str(one) for one in self.served if one.poll() is None]
        assert not left, f"left behind: {'; '.join(left)}"

    async def _end(self) -> None:
        for _ in range(10):  # what ends may begin something
            others = asyncio.all_tasks() - {asyncio.current_task()}
            if not others:
                return
            for task in others:
                task.cancel()
            await asyncio.wait(others, timeout=PATIENCE)


@contextlib.contextmanager
def opened() -> Iterator[RealTimeSwarm]:
    """A swarm for one test; averagers of its peers have no process meanwhile."""
    prepare_answers()  # before nothing is shared any more: other tests go on with them
    with contextlib.ExitStack() as patches:
        patches.enter_context(patch.dict(serialization._BASE_COMPRESSION_TYPES))
        patches.enter_context(patch.dict(MSGPackSerializer._ext_type_codes))
        patches.enter_context(patch.object(PeerID, "__init__", PeerID.__init__))
        # as in each averager's process
        bound_this_process()
        codecs.install()
        patches.enter_context(patch.object(Averager, "start", _serve))
        # nothing is for another process, and what the machine sends says nothing of lines in memory
        patches.enter_context(patch.object(torch.Tensor, "share_memory_", lambda tensor: tensor))
        patches.enter_context(patch.object(torch.Tensor, "is_shared", lambda tensor: True))
        patches.enter_context(patch.object(sending, "bytes_sent", dict))
        swarm = RealTimeSwarm()
        try:
            yield swarm
        finally:
            swarm.close()
    if SharedBytes._buffer is not None and not SharedBytes._buffer.is_shared():
        SharedBytes._buffer = None  # there was no room left: not for answers of processes
