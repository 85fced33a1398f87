"""Time that jumps: an event loop that waits for nothing, and the clocks of hivenb and hivemind told by it.

All of a test is one thread at a time. What runs in an executor runs in a thread of its own, and the loop stands still
until that has ended, or waits for something that the loop brings about: so nothing depends on which thread is quicker.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import logging
import selectors
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any
from unittest.mock import patch

logger = logging.getLogger(__name__)

#: When a test begins, by its clock, and seconds by which the time of the DHT is ahead of that.
BEGIN, EPOCH = 1000.0, 1.7e9

#: Seconds in reality that what runs in an executor may take.
PATIENCE = 60.0

#: Modules whose threads wait for events: for those of the loop's time, in a test.
_WAIT_FOR_EVENTS = ("hivemind.optim.progress_tracker", "hivenb.engine.progress.tracker")

_OWNER: contextvars.ContextVar[set[asyncio.Task[Any]] | None] = contextvars.ContextVar("owner", default=None)


class StandstillError(RuntimeError):
    """Nothing will ever happen any more: no timer is set, and the test waits for something."""


class _Selector(selectors.DefaultSelector):
    """Never waits: tells the loop how long it would have."""

    def __init__(self) -> None:
        super().__init__()
        self.on_wait: Callable[[float | None], None] = lambda seconds: None

    def select(self, timeout: float | None = None) -> list[Any]:
        found: list[Any] = super().select(0)
        if not found and timeout != 0:
            self.on_wait(timeout)
        return found


class OwningLoop(asyncio.SelectorEventLoop):
    """An event loop that knows whose tasks they are."""

    def create_task(self, coro: Any, **kwargs: Any) -> Any:
        task = super().create_task(coro, **kwargs)
        if (owned := _OWNER.get()) is not None:
            owned.add(task)
            task.add_done_callback(owned.discard)
        return task


class VirtualLoop(OwningLoop):
    """An event loop whose time jumps to the next timer as soon as nothing is ready."""

    def __init__(self) -> None:
        self._now = BEGIN
        selector = _Selector()
        selector.on_wait = self._jump
        self._idle: list[_Worker] = []
        self._waiting: dict[_Worker, asyncio.Future[Any]] = {}
        super().__init__(selector)

    def time(self) -> float:
        return self._now

    def dht_time(self) -> float:
        """In place of ``time.time``, which is the time of the DHT, too."""
        return EPOCH + self._now

    def _jump(self, seconds: float | None) -> None:
        if seconds is None:
            raise StandstillError("no timer is set any more, and the test waits for something")
        self._now += seconds

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        # without a traceback: it may be garbage collection that calls, while pytest looks at one, and Python 3.11 fails
        # where its parser is entered twice (https://github.com/python/cpython/issues/106905)
        logger.warning(f"{context['message']}: {context.get('exception')!r}")

    # -- what runs in threads -----------------------------------------------------------------------------------

    def run_in_executor(self, executor: object, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        outcome: asyncio.Future[Any] = self.create_future()
        context = contextvars.copy_context()
        self.call_soon(self._begin, outcome, lambda: context.run(func, *args))
        return outcome

    def _begin(self, outcome: asyncio.Future[Any], job: Callable[[], Any]) -> None:
        if outcome.done():
            return  # it was cancelled before
        worker = self._idle.pop() if self._idle else _Worker(self)
        self._waiting[worker] = outcome
        worker.job = job
        self._let_go_on(worker)

    def _let_go_on(self, worker: _Worker) -> None:
        if not worker.go_on():
            return
        outcome, self._idle = self._waiting.pop(worker), [*self._idle, worker]
        if outcome.done():
            return  # nobody waits for it any more
        if worker.error is None:
            outcome.set_result(worker.result)
        elif isinstance(worker.error, StopIteration):  # no future takes one
            outcome.set_exception(RuntimeError(repr(worker.error)))
        else:
            outcome.set_exception(worker.error)

    def let_wait(self, worker: _Worker, timeout: float | None, add_callback: Callable[[Any], None]) -> None:
        """In a worker: go on after so many seconds, or when it is called back."""
        woken = False

        def wake(*args: Any) -> None:
            nonlocal woken
            if not woken and not worker.is_over:
                woken = True
                self.call_soon(self._let_go_on, worker)

        add_callback(wake)
        if timeout is not None:
            self.call_later(timeout, wake)

    def close(self) -> None:
        for worker in [*self._waiting, *self._idle]:
            worker.end()
        self._waiting.clear()
        self._idle.clear()
        super().close()


class _Over(BaseException):
    """The loop has ended, and what waits for it in a thread with it."""


class _Worker(threading.Thread):
    """A thread that runs only while the loop stands still."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__(name="in-memory-worker", daemon=True)
        self.loop, self.job, self.is_over = loop, None, False
        self.result: Any = None
        self.error: BaseException | None = None
        self._may_run, self._has_stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.start()

    job: Callable[[], Any] | None

    def run(self) -> None:
        while True:
            self._may_run.acquire()
            if self.is_over or self.job is None:
                return
            self.result = self.error = None
            try:
                self.result = self.job()
            except _Over:
                return
            except BaseException as e:  # for whoever waits for it
                self.error = e
            self.job = None
            self._has_stopped.release()

    def go_on(self) -> bool:
        """In the loop: let it run until it waits or has ended. Whether it has."""
        self._may_run.release()
        if not self._has_stopped.acquire(timeout=PATIENCE):
            raise TimeoutError(f"a thread waits for something that the loop does not know of: {self.job}")
        return self.job is None

    def wait(self, timeout: float | None, add_callback: Callable[[Any], None]) -> None:
        """In the thread: wait for something that the loop brings about."""
        self.loop.let_wait(self, timeout, add_callback)
        self._has_stopped.release()
        self._may_run.acquire()
        if self.is_over:
            raise _Over

    def end(self) -> None:
        """In the loop: let it end, wherever it waits."""
        self.is_over = True
        self._may_run.release()
        self.join(PATIENCE)


def _wait(timeout: float | None, add_callback: Callable[[Any], None] = lambda wake: None) -> None:
    worker = threading.current_thread()
    if not isinstance(worker, _Worker):
        raise RuntimeError("this would stop the loop: call it in an executor")
    worker.wait(timeout, add_callback)


class Answer(concurrent.futures.Future):
    """What the loop will bring about; waited for in it, or in a thread, by the loop's time."""

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            _wait(timeout, self.add_done_callback)
        return super().result(0)

    def __await__(self) -> Generator[Any, None, Any]:
        if not self.done():
            waiter = asyncio.get_running_loop().create_future()
            self.add_done_callback(lambda _: waiter.done() or waiter.set_result(None))
            yield from waiter
        if self.cancelled():
            raise asyncio.CancelledError
        return super().result(0)


class _Event(threading.Event):
    """One that is waited for by the loop's time."""

    def __init__(self) -> None:
        super().__init__()
        self._wake: list[Callable[[], None]] = []

    def set(self) -> None:
        super().set()
        while self._wake:
            self._wake.pop()()

    def wait(self, timeout: float | None = None) -> bool:
        if not self.is_set() and timeout != 0:
            _wait(timeout, self._wake.append)
        return self.is_set()


class _Namespace:
    """Another module but for some names."""

    def __init__(self, module: Any, **names: Any):
        self._module = module
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@contextlib.contextmanager
def told_by(loop: VirtualLoop) -> Iterator[None]:
    """Lets hivenb and hivemind take the time from a loop; all else has that of the machine."""
    clocks = {"monotonic": loop.time, "perf_counter": loop.time, "time": loop.dht_time}
    replaced: dict[int, Any] = {id(getattr(time, name)): clock for name, clock in clocks.items()}
    replaced[id(time)] = _Namespace(time, sleep=_wait, **clocks)
    threads = _Namespace(threading, Event=_Event)
    with contextlib.ExitStack() as patches:
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] not in ("hivenb", "hivemind"):
                continue
            for attribute, value in list(vars(module).items()):
                if id(value) in replaced:
                    patches.enter_context(patch.object(module, attribute, replaced[id(value)]))
            if name in _WAIT_FOR_EVENTS:
                patches.enter_context(patch.object(module, "threading", threads))
        yield


def spawn(owned: set[asyncio.Task[Any]], coroutine: Any) -> asyncio.Task[Any]:
    """Begin something whose tasks, and all that they begin, are kept in a set until they are done."""
    context = contextvars.copy_context()
    context.run(_OWNER.set, owned)
    return context.run(asyncio.ensure_future, coroutine)
