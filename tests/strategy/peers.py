"""Peers in processes of their own, seen from the test that has started them: what they send, and what they are told."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import forked
import numpy as np
import psutil
import torch

from hivenb.engine.optimizer.scheduled_rounds import EpochReport
from strategy import peer
from strategy.peer import Moment

#: Seconds within which whatever is waited for has to happen.
PATIENCE = 120.0

#: Settings of a peer, unless the test says otherwise; see :func:`strategy.peer.train`.
DEFAULTS: dict[str, Any] = {
    "epochs": 4,
    "target": 64,
    "share": None,
    "module": peer.TinyModel,
    "model": {},
    "strategy": {},
    "trainer": {},
    "plain": {},
    "threaded": False,
    "save": None,
    "resume": None,
}


class Peer:
    """A peer in a process of its own, and what it has sent so far."""

    def __init__(self, target: Callable[..., None], *args: Any):
        self._connection, theirs = mp.Pipe()
        self._news = threading.Condition()
        self._hung_up = False
        self.addresses: list[str] = []
        self.moments: list[Moment] = []
        self.ends: list[tuple[int, list[torch.Tensor]]] = []
        self.process = forked.start(target, theirs, *args)
        theirs.close()
        self._reader = threading.Thread(target=self._read, name=f"read-{self.process.pid}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        # at once, whether anybody waits for it or not: the peer would wait for room in the pipe
        while True:
            try:
                kind, value = self._connection.recv()
            except (EOFError, OSError):
                kind, value = "hung up", None
            with self._news:
                if kind == "addresses":
                    self.addresses = value
                elif kind == "moment":
                    self.moments.append(value)
                elif kind == "end":
                    self.ends.append((value[0], _tensors(value[1])))
                else:
                    self._hung_up = True
                self._news.notify_all()
            if self._hung_up:
                return

    def tell(self, order: str) -> None:
        self._connection.send(order)

    def wait_until(self, condition: Callable[[], Any], what: str) -> Any:
        """The first value of ``condition`` that is true; it is asked again whenever the peer has sent something."""
        end = time.monotonic() + PATIENCE
        with self._news:
            while not (value := condition()):
                self.assert_well(what, time.monotonic() < end)
                self._news.wait(1.0)
        return value

    def assert_well(self, what: str, in_time: bool) -> None:
        assert not self._hung_up, f"ended with {self.process.exitcode} before {what}; {self._course()}"
        if not in_time:
            self._tell_where()
        assert in_time, f"not in time: {what}; {self._course()}"

    def _tell_where(self) -> None:
        """Let all its processes print what they are doing."""
        python = psutil.Process(self.process.pid).exe()
        for one in processes(self):
            with suppress(psutil.Error):
                if one.exe() == python:
                    one.send_signal(forked.TELL_WHERE)
                    time.sleep(0.2)  # so that they do not write into each other's lines

    def _course(self) -> str:
        return ", ".join(
            f"{m.epoch}: {m.report.group_size} in {m.report.seconds:.1f} s {m.report.failed or ''}"
            for m in self.moments
            if m.report is not None
        )

    def wait_for_epoch(self, epoch: int, group_size: int | None = None) -> Moment:
        """The first moment at that epoch or later (of that size, if one is given)."""
        return self.wait_until(
            lambda: next((m for m in self.since(epoch) if group_size in (None, m.report.group_size)), None),
            f"epoch {epoch} with {group_size or 'any number of'} peers",
        )

    def wait_for_end(self, stages: int = 1) -> None:
        self.wait_until(lambda: len(self.ends) == stages, "its end")
        self.process.join(30)
        assert self.process.exitcode == 0

    def begun(self, stage: int = 0) -> Moment:
        """The peer as it was before its first batch."""
        return self.wait_until(
            lambda: next((m for m in list(self.moments) if m.stage == stage and m.report is None), None), "its start"
        )

    def since(self, epoch: int, stage: int = 0) -> list[Moment]:
        return [m for m in list(self.moments) if m.stage == stage and m.report is not None and m.epoch >= epoch]

    def history(self, stage: int = 0) -> dict[int, list[torch.Tensor]]:
        """Parameters after each epoch."""
        return {m.epoch: _tensors(m.parameters) for m in self.since(0, stage)}

    def reports(self, stage: int = 0) -> list[EpochReport]:
        return [m.report for m in self.since(0, stage) if m.report is not None]

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Parameters in the end."""
        return self.ends[-1][1]

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self._reader.join(10)
        self._connection.close()


def _tensors(arrays: Iterable[np.ndarray]) -> list[torch.Tensor]:
    return [torch.from_numpy(array) for array in arrays]


Start = Callable[..., Peer]
Swarm = Callable[..., list[Peer]]


@contextmanager
def starting_peers() -> Iterator[Start]:
    """Gives a function that starts a peer, ``start(number, *stages, addresses=(), target=peer.train)``; ends all."""
    started: list[Peer] = []

    def start(
        number: int,
        *stages: dict[str, Any],
        addresses: Sequence[str] = (),
        target: Callable[..., None] = peer.train,
    ) -> Peer:
        whole = [{"peers": 1, **DEFAULTS, **stage} for stage in stages]
        started.append(Peer(target, number, list(addresses), whole))
        return started[-1]

    try:
        yield start
    finally:
        for one in started:
            one.end()


def train_all(start: Start, *peers: dict[str, Any] | Sequence[dict[str, Any]]) -> list[Peer]:
    """Trains with peers whose settings are given (of each stage, if there are several), until all have finished."""
    staged = [[own] if isinstance(own, dict) else own for own in peers]
    started: list[Peer] = []
    for number, stages in enumerate(staged):
        addresses = started[0].wait_until(lambda: started[0].addresses, "its addresses") if started else ()
        started.append(start(number, *({"peers": len(peers), **one} for one in stages), addresses=addresses))
    for one, stages in zip(started, staged, strict=True):
        one.wait_for_end(len(stages))
    return started


def difference(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))


def meet(peers: Sequence[Peer], since: int, agree: Callable[[int], bool] = lambda epoch: True) -> int:
    """Waits until all have ended two epochs in a row together, from that one on; the second of them.

    One is not enough: a newcomer can meet the others in a round that is not of its epoch, and takes their state again.

    :param agree: whether they are as the test wants them after an epoch
    """
    end = time.monotonic() + PATIENCE
    while True:
        common = set.intersection(*({*met(one, since, len(peers))} for one in peers))
        for epoch in sorted(common):
            if epoch - 1 in common and agree(epoch - 1) and agree(epoch):
                return epoch
        for one in peers:
            one.assert_well(f"two epochs together from {since} on", time.monotonic() < end)
        time.sleep(0.05)


def met(one: Peer, since: int, count: int) -> dict[int, Moment]:
    return {moment.epoch: moment for moment in one.since(since) if moment.report.group_size == count}


def assert_they_met(peers: Sequence[Peer], stage: int = 0) -> None:
    for one in peers:
        reports = one.reports(stage)
        assert [report.failed for report in reports] == [None] * len(reports)
        assert [report.group_size for report in reports] == [len(peers)] * len(reports)


def stop(peers: Sequence[Peer]) -> None:
    """Lets them end, all at the same time."""
    for one in peers:
        one.tell("stop")
    for one in peers:
        one.wait_for_end()


def processes(peer: Peer, whole_tree: bool = True) -> list[psutil.Process]:
    main = psutil.Process(peer.process.pid)
    return [main, *(main.children(recursive=True) if whole_tree else [])]


def kill(peer: Peer, whole_tree: bool) -> None:
    for one in processes(peer, whole_tree):
        os.kill(one.pid, signal.SIGKILL)
    peer.process.join(20)


@contextmanager
def cut_off(peer: Peer) -> Iterator[None]:
    """As when its network is cut, or its machine is gone: nobody is told that its connections have ended."""
    stopped = processes(peer)
    for one in stopped:
        os.kill(one.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for one in stopped:
            with suppress(ProcessLookupError):  # it has ended with its parent
                os.kill(one.pid, signal.SIGKILL)
