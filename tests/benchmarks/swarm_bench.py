"""Swarms of benchmark peers, seen from the script that has started them: what they send, and what it comes to."""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import multiprocessing as mp
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import bench_peer
import psutil
from bench_peer import Epoch, Work

#: Seconds within which whatever is waited for has to happen, unless said otherwise.
PATIENCE = 120.0
#: Epochs of each peer that count as its start.
WARM_UP = 2

_PR_SET_CHILD_SUBREAPER = 36

Target = Callable[..., None]


class Peer:
    """A peer in a process of its own, and what it has sent so far.

    :param target: what it runs, of :mod:`bench_peer`
    """

    def __init__(self, target: Target, addresses: Sequence[str], work: Work, count: int, folder: str):
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "lightning", "hivenb.strategy"])
        self._connection, theirs = mp.Pipe()
        self._news = threading.Condition()
        self._hung_up = False
        self.said: dict[str, Any] = {}
        self.epochs: list[Epoch] = []
        self.process = context.Process(target=target, args=(theirs, list(addresses), work, count, folder))
        self.process.start()
        theirs.close()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while not self._hung_up:
            try:
                kind, value = self._connection.recv()
            except (EOFError, OSError):
                kind, value = "hung up", None
            with self._news:
                if kind == "epoch":
                    self.epochs.append(value)
                else:
                    self.said[kind] = value
                self._hung_up = kind == "hung up"
                self._news.notify_all()

    def wait_until(self, condition: Callable[[], Any], what: str, patience: float = PATIENCE) -> Any:
        """The first value of ``condition`` that is true; it is asked again whenever the peer has sent something."""
        end = time.monotonic() + patience
        with self._news:
            while not (value := condition()):
                if self._hung_up or time.monotonic() > end:
                    state = f"ended with {self.process.exitcode}" if self._hung_up else "is too slow"
                    raise RuntimeError(f"A peer {state} before {what}; its newest epochs: {self.epochs[-4:]}")
                self._news.wait(min(1.0, patience))
        return value

    def wait_for(self, kind: str) -> Any:
        self.wait_until(lambda: kind in self.said, kind)
        return self.said[kind]

    def wait_for_epoch(self, epoch: int, patience: float = PATIENCE) -> Epoch:
        """The first that it has ended and that is that one or a later one."""
        return self.wait_until(lambda: self.first_since(epoch), f"epoch {epoch}", patience)

    def first_since(self, epoch: int) -> Epoch | None:
        return next((one for one in list(self.epochs) if one.epoch >= epoch), None)

    def tell(self, order: Any) -> None:
        self._connection.send(order)

    def leave(self) -> None:
        self.tell("stop")
        self.wait_for("left")
        self.process.join(30)

    def tree(self) -> list[psutil.Process]:
        """The process and all that descend from it, but for torch's managers of shared memory.

        They end by themselves, when they have removed what the others left in ``/dev/shm``: gigabytes after a while.
        """
        try:
            main = psutil.Process(self.process.pid)
            everybody = [main, *main.children(recursive=True)]
            return [process for process in everybody if "torch_shm_manag" not in process.name()]
        except psutil.NoSuchProcess:
            return []

    def fall_silent(self) -> None:
        """Stop all its processes, as if its network were cut: the others' connections stay."""
        for process in self.tree():
            process.suspend()

    def kill(self, whole_tree: bool = True) -> None:
        """End it by force, with its daemon and its averagers or alone."""
        doomed = self.tree()
        for process in doomed if whole_tree else doomed[:1]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.join(10)


def adopt_orphans() -> None:
    """Make those whose parents are killed children of this process, so that it can see them off."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@contextmanager
def starting() -> Iterator[Callable[..., Peer]]:
    """Gives ``start(work, others=(), target=bench_peer.with_strategy, count=1)``; ends all that it has started."""
    adopt_orphans()
    started: list[Peer] = []
    with tempfile.TemporaryDirectory(prefix="hivenb-bench-", ignore_cleanup_errors=True) as folder:

        def start(
            work: Work, others: Sequence[Peer] = (), target: Target = bench_peer.with_strategy, count: int = 1
        ) -> Peer:
            addresses = others[0].wait_for("addresses") if others else ()
            started.append(Peer(target, addresses, work, count, folder))
            return started[-1]

        try:
            yield start
        finally:
            trees = [peer.tree() for peer in started]
            for peer in started:
                peer.kill()
            psutil.wait_procs([process for tree in trees for process in tree], timeout=10)


def rate_alone(work: Work, seconds: float = 2.5) -> float:
    """Samples per second of one that trains without hivemind, which is what all efficiency is measured by."""
    with starting() as start:
        peer = start(work, target=bench_peer.alone, count=max(10, round(seconds / work.step)))
        return peer.wait_for("rate")


def leave_all(peers: Sequence[Peer]) -> None:
    """All at the same time, within a limit."""
    for peer in peers:
        peer.tell("stop")
    for peer in peers:
        peer.wait_for("left")


def settled_epoch(peers: Sequence[Peer], patience: float = PATIENCE) -> int:
    """Waits until all have their start behind them; the epoch from which on that is so."""
    begun = [
        peer.wait_until(lambda peer=peer: peer.epochs[WARM_UP - 1 : WARM_UP], "its start", patience) for peer in peers
    ]
    epoch = max(first.epoch for (first,) in begun)
    for peer in peers:
        peer.wait_for_epoch(epoch, patience)
    return epoch


@dataclass(frozen=True)
class Figures:
    """What some peers came to between two of their epochs.

    :param rate: samples per second of all of them together
    :param stalled: share of the time in which training stood still at the end of an epoch
    :param in_step: share of the time in ``step``, without the computing of gradients
    :param waiting: share of the time in which ``step`` waited for anything but a core
    :param longest: stall, seconds
    :param group_size: mean of all rounds
    :param failed: rounds
    """

    rate: float
    stalled: float
    in_step: float
    waiting: float
    longest: float
    group_size: float
    rounds: int
    failed: int


def figures(peers: Sequence[Peer], first: int, last: int) -> Figures:
    """Of all epochs after the ``first`` up to the ``last``, which all have ended."""
    parts = [_part(peer, first, last) for peer in peers]
    walls = [part[-1].at - part[0].at for part in parts]
    rounds = [one for part in parts for one in part[1:]]
    in_step = [part[-1].in_step - part[0].in_step for part in parts]
    return Figures(
        rate=sum(sum(one.samples for one in part[1:]) / wall for part, wall in zip(parts, walls, strict=True)),
        stalled=sum(one.stalled for one in rounds) / sum(walls),
        in_step=sum(one.wall for one in in_step) / sum(walls),
        waiting=sum(one.waiting for one in in_step) / sum(walls),
        longest=max(one.stalled for one in rounds),
        group_size=statistics.mean(one.group_size for one in rounds),
        rounds=len(rounds),
        failed=sum(one.failed is not None for one in rounds),
    )


@dataclass(frozen=True)
class Course:
    """A swarm from its beginning on.

    :param figures: of all peers after their start
    :param cpu: seconds of CPU time of all processes, for each second
    :param start: seconds stalled and size of the group in each epoch of the start, of the first peer
    :param sent: bytes by one peer in an epoch after the start; 0 where nobody counts them
    """

    figures: Figures
    cpu: float
    start: list[tuple[float, int]]
    sent: float = 0.0


def course(
    works: Sequence[Work],
    epochs: int,
    patience: float,
    target: Target = bench_peer.with_strategy,
    bytes_sent: Callable[[], int] = lambda: 0,
) -> Course:
    """Let a swarm train, and leave.

    :param works: of each peer
    :param epochs: after the start
    :param patience: seconds that an epoch may take
    :param bytes_sent: by all peers so far
    """
    with starting() as start:
        peers: list[Peer] = []
        for work in works:
            peers.append(start(work, peers, target, len(works)))
        first = settled_epoch(peers, PATIENCE + (WARM_UP + 1) * patience)
        began, cpu, sent = time.monotonic(), cpu_seconds(peers), bytes_sent()
        for peer in peers:
            peer.wait_for_epoch(first + epochs, PATIENCE + epochs * patience)
        cpu = (cpu_seconds(peers) - cpu) / (time.monotonic() - began)
        sent_by_one = (bytes_sent() - sent) / (epochs * len(peers))
        found = figures(peers, first, first + epochs)
        begun = [(one.stalled, one.group_size) for one in peers[0].epochs[:WARM_UP]]
        leave_all(peers)
    return Course(found, cpu, begun, sent_by_one)


def lost(peer: Peer, first: int, last: int, seconds_per_sample: float) -> float:
    """Seconds of a peer between two epochs in which it put nothing into the swarm."""
    part = _part(peer, first, last)
    return part[-1].at - part[0].at - sum(one.samples for one in part[1:]) * seconds_per_sample


def _part(peer: Peer, first: int, last: int) -> list[Epoch]:
    start, end = peer.first_since(first), peer.first_since(last)
    assert start is not None
    assert end is not None
    return [one for one in list(peer.epochs) if start.at <= one.at <= end.at]


def cpu_seconds(peers: Sequence[Peer]) -> float:
    """CPU time of all their processes so far."""
    total = 0.0
    for process in [process for peer in peers for process in peer.tree()]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


# -- the script around it ---------------------------------------------------------------------------------------


def parser(description: str | None) -> argparse.ArgumentParser:
    """With what all benchmarks have: the first line of their docstring, ``--quick`` and ``--json``."""
    made = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    made.add_argument("--quick", action="store_true", help="less of everything: whether it works, not what it measures")
    made.add_argument("--json", type=Path, help="a file to write the rows to")
    return made


def machine() -> str:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory = psutil.virtual_memory().total / 2**30
    packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("hivemind", "lightning", "torch"))
    load = os.getloadavg()[0]
    python = platform.python_version()
    cores = len(os.sched_getaffinity(0))
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    tcp = control.read_text().strip() if control.exists() else "what is not told"
    return f"{cores} cores of {model}, {memory:.0f} GiB, load {load:.1f}, TCP by {tcp}; Python {python}, {packages}"


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns as wide as what they hold; numbers to the right."""
    cells = [[cell if isinstance(cell, str) else f"{cell:,}" for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(heads), *cells]) for i in range(len(heads))]
    right = [all(not isinstance(row[i], str) or row[i][:1].isdigit() for row in rows) for i in range(len(heads))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()

    return "\n".join([line(heads), "  ".join("-" * width for width in widths), *map(line, cells)])


def write_json(file: Path | None, rows: Sequence[Any], **besides: Any) -> None:
    """The rows, dataclasses, and whatever else there is to say, with the machine; nowhere if there is no file."""
    if file is not None:
        content = {"machine": machine(), **besides, "rows": [asdict(row) for row in rows]}
        file.write_text(json.dumps(content, indent=1) + "\n")


#: For what a script does meanwhile, which belongs in no table.
say = partial(print, file=sys.stderr, flush=True)
