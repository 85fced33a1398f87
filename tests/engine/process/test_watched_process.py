"""The end of a child is known at once, with its reason, to all who wait for it."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hivemind.utils import MPFuture
from hivemind.utils.mpfuture import SharedBytes, UpdateType

from hivenb.engine.process.child import _HELD_BY_THE_DEAD, free_abandoned
from hivenb.engine.process.watched_child import AnsweredPipe, WatchedProcess, how_it_ended
from hivenb.errors import ProcessEndedError

#: Seconds within which an end is to be known.
AT_ONCE = 5.0


class Service(WatchedProcess, mp.Process):
    """Answers as hivemind's processes do, or never."""

    title = "the service"

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._inner_pipe, self._outer_pipe = mp.Pipe()
        self._ready = MPFuture()
        self.told = threading.Event()

    def run(self) -> None:
        self._ready.set_result(None)
        while True:
            method, _, answers = self._inner_pipe.recv()
            if method == "answer":
                answers["future"].set_result("here")
            elif method == "hold a lock":
                SharedBytes._lock.acquire()
                answers["future"].set_result("held")
            elif method == "break off":
                with MPFuture._update_lock:
                    os.write(answers["future"]._sender_pipe.fileno(), struct.pack("!i", 1 << 20) + b"half")
                    os.kill(os.getpid(), signal.SIGKILL)
            elif method == "answer and die":
                with MPFuture._update_lock:
                    future = answers["future"]
                    future._sender_pipe.send((future._uid, UpdateType.RESULT, "last"))
                    os.kill(os.getpid(), signal.SIGKILL)
            elif method == "answer later":
                time.sleep(2 * _HELD_BY_THE_DEAD)
                answers["future"].set_result("late")
            elif method == "exit":
                os._exit(3)

    def ask(self, method: str) -> MPFuture[Any]:
        future: MPFuture[Any] = MPFuture()
        self._outer_pipe.send((method, [], {"future": future}))
        return future

    def _has_ended(self, error: ProcessEndedError) -> None:
        super()._has_ended(error)
        self.told.set()


@pytest.fixture
def service() -> Iterator[Service]:
    started = Service()
    started.start()
    started._ready.result(20)
    yield started
    started.kill()


@pytest.mark.process
def test_who_waits_for_a_process_that_is_killed_learns_why(service: Service) -> None:
    assert service.ask("answer").result(AT_ONCE) == "here"
    waiting = service.ask("nothing")
    assert service.pid is not None
    os.kill(service.pid, signal.SIGKILL)
    reason = rf"the service \(process {service.pid}\) was killed by signal 9 \(SIGKILL\), often by the system when"
    with pytest.raises(ProcessEndedError, match=reason):
        waiting.result(AT_ONCE)
    with pytest.raises(ProcessEndedError, match=reason):
        service.ask("answer").result(AT_ONCE)
    assert service.told.wait(AT_ONCE)
    assert str(service.ended).startswith("the service")


def die_with(lock: Any) -> None:
    """Let a process that nobody watches die while it holds a lock, as one of plain hivemind's may."""
    if not (pid := os.fork()):
        lock.acquire()
        os._exit(0)
    os.waitpid(pid, 0)


@pytest.mark.process
@pytest.mark.parametrize("lock", [MPFuture._initialization_lock, MPFuture._update_lock, SharedBytes._lock])
def test_one_starts_though_another_that_nobody_watched_died_with_a_lock(lock: Any) -> None:
    die_with(lock)
    assert not lock.acquire(block=False)
    service = Service()
    service.start()
    assert service._ready.result(20) is None
    assert service.ask("answer").result(AT_ONCE) == "here"
    service.kill()


@pytest.mark.process
def test_one_that_ends_by_itself_says_so(service: Service) -> None:
    with pytest.raises(ProcessEndedError, match="has ended by itself with exit code 3"):
        service.ask("exit").result(AT_ONCE)


@pytest.mark.process
@pytest.mark.parametrize("end", [Service.kill, Service.terminate])
def test_one_that_is_ended_on_purpose_is_no_news(service: Service, end: Any) -> None:
    end(service)
    assert not service.told.wait(0.5)
    assert service.ended is None


@pytest.mark.process
@pytest.mark.slow
def test_a_lock_that_it_took_along_is_free_again_each_time() -> None:
    for _ in range(3):
        service = Service()
        service.start()
        service._ready.result(20)
        assert service.ask("hold a lock").result(AT_ONCE) == "held"
        assert service.pid is not None
        os.kill(service.pid, signal.SIGKILL)
        assert service.told.wait(2 * AT_ONCE)
        assert SharedBytes._lock.acquire(timeout=AT_ONCE), "nothing of hivemind's would ever answer again"
        SharedBytes._lock.release()


@pytest.mark.process
def test_one_that_is_killed_in_the_middle_of_an_answer_leaves_the_others_heard(service: Service) -> None:
    other = Service()
    other.start()
    try:
        other._ready.result(20)
        with pytest.raises(ProcessEndedError, match="SIGKILL"):
            service.ask("break off").result(2 * AT_ONCE)
        assert other.ask("answer").result(AT_ONCE) == "here"
    finally:
        other.kill()


@pytest.mark.process
def test_one_that_is_killed_after_a_whole_answer_loses_none_of_the_others(service: Service) -> None:
    other = Service()
    other.start()
    try:
        other._ready.result(20)
        later = other.ask("answer later")
        assert service.ask("answer and die").result(AT_ONCE) == "last"
        assert service.told.wait(2 * AT_ONCE)
        assert later.result(2 * AT_ONCE) == "late"
        with pytest.raises(ProcessEndedError, match="SIGKILL"):
            service.ask("answer").result(AT_ONCE)
    finally:
        other.kill()


@pytest.mark.process
@pytest.mark.parametrize("times_abandoned", [0, 1, 2])
def test_a_lock_that_the_living_hold_stays_theirs(times_abandoned: int) -> None:
    lock = mp.Lock()
    for _ in range(times_abandoned):
        process = mp.get_context("fork").Process(target=lock.acquire)
        process.start()
        process.join()
        assert free_abandoned([lock]) == [lock]
    with lock:
        free_abandoned([lock])
        assert not lock.acquire(block=False)
    assert lock.acquire(block=False)


def test_a_round_that_cannot_begin_fails_by_itself() -> None:
    """hivemind waits for its triggers first, and would complain of a round without them."""
    _, outer = mp.Pipe()
    pipe = AnsweredPipe(outer)
    step, triggers = MPFuture[Any](), MPFuture[Any]()
    for name, answer in (("step", step), ("future_for_init", triggers)):
        pipe.expect(answer, name)
    pipe.end(ProcessEndedError("gone"))
    assert [type(one) for one in triggers.result(0)] == [MPFuture, MPFuture]
    with pytest.raises(ProcessEndedError, match="gone"):
        step.result(0)


def test_nobody_is_kept_by_a_pipe() -> None:
    _, outer = mp.Pipe()
    pipe = AnsweredPipe(outer)
    pipe.expect(MPFuture())
    deadline = time.monotonic() + AT_ONCE
    while pipe._waiting and time.monotonic() < deadline:
        time.sleep(0.01)
    assert pipe._waiting == {}


@pytest.mark.parametrize(
    ("exit_code", "words"),
    [
        (0, "has ended by itself with exit code 0"),
        (-15, "was killed by signal 15 (SIGTERM)"),
        (-9, "was killed by signal 9 (SIGKILL), often by the system when memory runs out"),
        (-63, "was killed by signal 63"),
        (None, "has ended"),
    ],
)
def test_how_a_process_has_ended_in_words(exit_code: int | None, words: str) -> None:
    assert how_it_ended(exit_code) == words
