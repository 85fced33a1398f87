"""Profiles batches on a GPU: how long the thread that trains waits for the device, and what is copied how.

The ways, the model and the helper are those of ``gpu.py``. After the start, the batches of an epoch are profiled, with
the round at its end. A row says, for a batch: calls of CUDA that wait for the device, and for how long; copies
between it and main memory, in both directions, and how many of them were of memory that is not pinned, which nothing
overlaps.

    python tests/benchmarks/staging.py --json staging.json
    python tests/benchmarks/staging.py --traces DIR       # for chrome://tracing or https://ui.perfetto.dev

Without a GPU it says so, and measures nothing; ``--device cpu --quick`` only tries whether the script works.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu import FULL, TINY, Clock, Task, figures_of, is_there, parser_of_devices, train
from swarm_bench import say, table, write_json
from torch.profiler import ProfilerActivity, profile

#: Calls that return only when the device has done something.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
#: What the profiler calls copies, and those from or to memory that is not pinned.
COPY, NOT_PINNED = "Memcpy", "Pageable"
#: Epochs that are profiled.
PROFILED = 1


class Profiled(Clock):
    """Profiles all batches after the start."""

    def __init__(self, task: Task, strategy: Any):
        super().__init__(task, strategy)
        # of the CPU only what it asks the device for: all operations of torch's would slow down what is looked at
        activity = ProfilerActivity.CUDA if task.device == "cuda" else ProfilerActivity.CPU
        self.profile = profile(activities=[activity])
        self.batches = 0

    def on_start_over(self) -> None:
        self.profile.start()

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches += self.is_start_over
        super().on_train_batch_end(*args)

    def on_train_end(self, *args: Any) -> None:
        self.profile.stop()


@dataclass(frozen=True)
class Row:
    """One way to train; numbers are of one batch, on average.

    :param waits: calls that wait for the device
    :param waited: seconds that they took
    :param copies: between the device and main memory
    :param not_pinned: of them, with memory that is not pinned
    :param copied: seconds of the device that copies took
    """

    way: str
    batches: int
    waits: float
    waited: float
    copies: float
    not_pinned: float
    copied: float


def summed(events: Iterable[Any], batches: int) -> dict[str, float]:
    """What a profile comes to, by the fields of a row."""
    events = list(events)
    waits = [event for event in events if event.name in WAITS]
    copies = [event for event in events if event.name.startswith(COPY) and "DtoD" not in event.name]
    return {
        "batches": batches,
        "waits": len(waits) / batches,
        "waited": sum(event.time_range.elapsed_us() for event in waits) / 1e6 / batches,
        "copies": len(copies) / batches,
        "not_pinned": sum(NOT_PINNED in event.name for event in copies) / batches,
        "copied": sum(event.time_range.elapsed_us() for event in copies) / 1e6 / batches,
    }


def profiled(connection: Any, initial_peers: Sequence[str], task: Task, count: int, folder: str) -> None:
    """Train, and send what the profile comes to."""
    clock, _ = train(connection, task, count, folder, Profiled)
    if task.trace is not None:
        clock.profile.export_chrome_trace(task.trace)
    connection.send(("figures", summed(clock.profile.events() or (), clock.batches)))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser_of_devices(__doc__, epoch=20)
    options.add_argument("--traces", type=Path, help="a folder for a trace of each way")
    given = options.parse_args(arguments)
    if not is_there(given):
        return 0
    size = TINY if given.device == "cpu" or given.quick else FULL
    epoch = 20 if given.quick else given.epoch
    task = Task(epoch * size.batch, size=size, device=given.device, epoch=epoch, epochs=PROFILED)
    rows = []
    for number, way in enumerate(given.ways):
        say(f"{way} ...")
        trace = None if given.traces is None else str(given.traces.resolve() / f"{number}.json.gz")
        rows.append(Row(way, **figures_of(way, replace(task, trace=trace), profiled)))
    cells = [
        [
            row.way,
            row.batches,
            f"{row.waits:.1f}",
            f"{1000 * row.waited:.1f}",
            f"{row.copies:.1f}",
            f"{row.not_pinned:.1f}",
            f"{1000 * row.copied:.1f}",
        ]
        for row in rows
    ]
    print(table(["", "batches", "waits", "waited, ms", "copies", "not pinned", "copied, ms"], cells))
    write_json(given.json, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
