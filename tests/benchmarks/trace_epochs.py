"""Traces some epochs of a swarm: what each peer's training thread and averagers do when, for chrome://tracing.

The file is in the Trace Event Format, which https://ui.perfetto.dev opens as well
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU): a process for each peer, and in it
the thread that trains and the averagers of gradients and state. What the ends of epochs are made of is printed.
Computing is a fixed wait in each step.

    python tests/benchmarks/trace_epochs.py --peers 4 --out trace.json
    python tests/benchmarks/trace_epochs.py --peers 4 --line 100 --out trace.json
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench_peer
from bench_peer import Work
from places import Line, places
from swarm_bench import PATIENCE, Peer, leave_all, machine, parser, say, settled_epoch, starting, table, write_json

from hivenb.engine.averaging.gradient_averager import GradientAverager
from hivenb.engine.averaging.state_averager import TrainingStateAverager
from hivenb.engine.matchmaking.matchmaking import EpochMatchmaking
from hivenb.engine.optimizer.optimizer import Optimizer
from hivenb.engine.optimizer.scheduled_rounds import AgreedRounds

#: What is traced, by how it is called. The end of an epoch is what all else of the thread that trains is seen beside.
END = "end of an epoch"
TRACED: tuple[tuple[type, str, str], ...] = (
    (bench_peer.Weights, "training_step", "compute"),
    (Optimizer, "_check_and_accumulate_gradients", "add up gradients"),
    (Optimizer, "_update_global_epoch", END),
    (AgreedRounds, "be_ready_for_gradients", "have a round of gradients"),
    (AgreedRounds, "average_gradients", "wait for averaged gradients"),
    (TrainingStateAverager, "step", "step, and average the state"),
    (EpochMatchmaking, "look_for_group", "matchmaking"),
    (GradientAverager, "_aggregate_with_group", "exchange gradients"),
    (TrainingStateAverager, "_aggregate_with_group", "exchange the state"),
)


@dataclass(frozen=True)
class Event:
    """Something that took a while.

    :param name: as in :data:`TRACED`
    :param process: id of the process that it happened in
    :param thread: id of the thread, or of the averager's only one
    :param began: microseconds of the clock that all processes of the machine share
    :param took: microseconds
    """

    name: str
    process: int
    thread: int
    began: float
    took: float


class Recorder:
    """Writes events to one file for each process, which its own children inherit.

    :param folder: for the files, whose names begin with the number of the peer
    """

    def __init__(self, folder: Path, peer: int):
        self._folder, self._peer = folder, peer
        self._lock = threading.Lock()

    def note(self, name: str, began: float) -> None:
        """Something has ended that began at that second."""
        event = [name, os.getpid(), threading.get_native_id(), 1e6 * began, 1e6 * (time.monotonic() - began)]
        with self._lock, (self._folder / f"{self._peer}-{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(event) + "\n")

    def watch(self, owner: type, method: str, name: str) -> None:
        """Note each call of a method of a class, in this process and in those that it forks."""
        original = getattr(owner, method)
        if inspect.iscoroutinefunction(original):

            @functools.wraps(original)
            async def watched_task(*args: Any, **kwargs: Any) -> Any:
                began = time.monotonic()
                try:
                    return await original(*args, **kwargs)
                finally:
                    self.note(name, began)

            setattr(owner, method, watched_task)
            return

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            try:
                return original(*args, **kwargs)
            finally:
                self.note(name, began)

        setattr(owner, method, watched)


@dataclass(frozen=True)
class Traced:
    """A target of a benchmark peer that notes what it does; it can be pickled.

    :param folder: for what it notes
    :param peer: its number
    """

    folder: str
    peer: int

    def __call__(self, *args: Any) -> None:
        recorder = Recorder(Path(self.folder), self.peer)
        for owner, method, name in TRACED:
            recorder.watch(owner, method, name)
        bench_peer.with_strategy(*args)


def read(folder: Path) -> dict[int, list[Event]]:
    """By peer, all that was noted, in the order in which it began."""
    found: dict[int, list[Event]] = defaultdict(list)
    for file in folder.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            found[int(file.name.partition("-")[0])].append(Event(*json.loads(line)))
    return {peer: sorted(events, key=lambda one: one.began) for peer, events in sorted(found.items())}


def chrome_trace(events: dict[int, list[Event]], since: float) -> dict[str, Any]:
    """What chrome://tracing opens.

    :param since: microseconds of the shared clock, before which nothing is shown
    """
    shown: list[dict[str, Any]] = []
    for peer, own in events.items():
        shown.append({"ph": "M", "name": "process_name", "pid": peer, "args": {"name": f"peer {peer}"}})
        for thread, name in _threads(own).items():
            shown.append({"ph": "M", "name": "thread_name", "pid": peer, "tid": thread, "args": {"name": name}})
        for one in own:
            if one.began >= since:
                times = {"ts": one.began - since, "dur": one.took}
                shown.append({"ph": "X", "name": one.name, "pid": peer, "tid": one.thread, **times})
    return {"traceEvents": shown, "displayTimeUnit": "ms"}


def _threads(events: Iterable[Event]) -> dict[int, str]:
    names: dict[int, str] = {}
    for one in events:
        for of_thread, what in (
            ("exchange gradients", "gradients"),
            ("exchange the state", "state"),
            (END, "training"),
        ):
            if one.name == of_thread:
                names[one.thread] = what
    return names


@dataclass(frozen=True)
class Row:
    """What the ends of a peer's epochs are made of.

    :param name: of :data:`TRACED`
    :param seconds: in one end of an epoch, the mean
    :param most: in one
    """

    peer: int
    name: str
    seconds: float
    most: float


def shares(peer: int, events: Sequence[Event], since: float) -> list[Row]:
    """What of a peer lies within the ends of its epochs, in its training thread or its averagers."""
    ends = [one for one in events if one.name == END and one.began >= since]
    rows = []
    for name in dict.fromkeys(name for _, _, name in TRACED if name != "compute"):
        within = [
            sum(
                max(0.0, min(one.began + one.took, end.began + end.took) - max(one.began, end.began))
                for one in events
                if one.name == name
            )
            for end in ends
        ]
        if any(within):
            rows.append(Row(peer, name, statistics.mean(within) / 1e6, max(within) / 1e6))
    return rows


@contextmanager
def works_on(milliseconds: float, works: Sequence[Work]) -> Iterator[Sequence[Work]]:
    """The works of peers, each on a host of its own if the lines between them have a length.

    :param milliseconds: there and back, at 50 Mbit/s each way
    """
    if not milliseconds:
        yield works
        return
    home = Line(delay=milliseconds / 4e3, up=50e6, down=50e6)  # two hosts are two lines apart
    with places([home] * len(works)) as (_, found):
        yield [work.at(place) for work, place in zip(works, found, strict=True)]


def trace(works: Sequence[Work], epochs: int, patience: float) -> tuple[dict[int, list[Event]], float]:
    """Let a swarm train, after its start.

    :param works: of each peer
    :param epochs: that are traced
    :param patience: seconds that one may take
    :returns: what the peers noted, and since when it counts: microseconds of the shared clock
    """
    with tempfile.TemporaryDirectory(prefix="hivenb-trace-") as folder, starting() as start:
        peers: list[Peer] = []
        for number, work in enumerate(works):
            peers.append(start(work, peers, Traced(folder, number), len(works)))
        first = settled_epoch(peers, PATIENCE)
        since = 1e6 * time.monotonic()
        for peer in peers:
            peer.wait_for_epoch(first + epochs, PATIENCE + epochs * patience)
        leave_all(peers)
        return read(Path(folder)), since


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--peers", type=int, default=4)
    options.add_argument("--epoch", type=float, default=2.4, help="seconds of computing in an epoch")
    options.add_argument("--epochs", type=int, default=4, help="that are traced, after the start")
    options.add_argument("--step", type=float, default=0.05, help="seconds that the computing of a batch takes")
    options.add_argument("--parameters", type=int, default=Work.parameters, help="of the model")
    options.add_argument("--line", type=float, default=0.0, help="milliseconds there and back; as root")
    options.add_argument("--out", type=Path, help="a file for the trace")
    given = options.parse_args(arguments)
    if given.quick:
        given.peers, given.epoch, given.epochs = 2, 0.5, 2
    print(machine())
    target = given.peers * round(given.epoch / given.step) * Work.batch
    work = Work(target=target, step=given.step, parameters=given.parameters)
    with works_on(given.line, [work] * given.peers) as works:
        events, since = trace(works, given.epochs, given.epoch + 35)
    rows = [row for peer, own in events.items() for row in shares(peer, own, since)]
    cells = [[row.peer, row.name, f"{1e3 * row.seconds:.1f}", f"{1e3 * row.most:.1f}"] for row in rows]
    print(table(["peer", "within the ends of epochs", "mean, ms", "most, ms"], cells))
    write_json(given.json, rows)
    if given.out is not None:
        given.out.write_text(json.dumps(chrome_trace(events, since)))
        say(f"{given.out}: open it at chrome://tracing or https://ui.perfetto.dev")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
