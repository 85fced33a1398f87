"""Measures what an open dashboard takes from training, and what a frame and a long history cost.

A real kernel trains, and the dashboard is open and closed by turns; batches per second count, and the CPU time of the
kernel. There is no browser. The picture alone is measured in this process, after so many points of each series,
beside the same panels on matplotlib's Axes.

    python tests/benchmarks/dashboard.py --json dashboard.json
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from axes_charts import AxesCharts
from swarm_bench import adopt_orphans, machine, parser, say, table, write_json

from hivenb.history import History, Series
from hivenb.view.charts.drawing import ChartImage

#: What the recorder and the monitor of a run fill most, and points of each of them.
SERIES = ("loss", "peers", "group_size", "stalled_seconds", "samples_per_second")
POINTS = (1_000, 10_000_000)

SET_UP = """
import json, time, torch, hivenb
from hivenb import tasks
torch.set_num_threads(1)
task = tasks.digits()
swarm = hivenb.Swarm()
options = hivenb.Options(target_batch_size=task.target_batch_size)
run = hivenb.TrainingRun(task.model, task.train, swarm=swarm, options=options)
run.start()
run.wait(epochs=3)
dashboard = None

def block(seconds):
    began, steps, used = time.perf_counter(), run.trainer.global_step, time.process_time()
    time.sleep(seconds)
    took = time.perf_counter() - began
    return json.dumps([(run.trainer.global_step - steps) / took, (time.process_time() - used) / took])
"""
OPEN = """
dashboard = hivenb.Dashboard(run)
dashboard
"""
CLOSE = "dashboard.close()"
END = "run.stop(); swarm.close()"


@dataclass(frozen=True)
class Row:
    """A pair of blocks.

    :param closed: batches per second, and seconds of CPU time of the kernel for each second
    :param opened: likewise, with the dashboard
    """

    closed: tuple[float, float]
    opened: tuple[float, float]

    @property
    def ratio(self) -> float:
        """Throughput with the dashboard over that without."""
        return self.opened[0] / self.closed[0]


@dataclass(frozen=True)
class Frame:
    """The picture of a history.

    :param points: recorded in each series
    :param record: seconds that one took
    :param frame: seconds for snapshot and picture after a further point, in each repetition
    :param axes: likewise, drawn by matplotlib's Axes
    :param size: bytes of the points that are kept
    """

    points: int
    record: float
    frame: list[float]
    axes: list[float]
    size: int

    @property
    def ratio(self) -> float:
        """How many times as long matplotlib's Axes take."""
        return statistics.median(self.axes) / statistics.median(self.frame)


def measure_training(pairs: int, seconds: float) -> list[Row]:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from kernel.real_kernel import Kernel  # the tests' own

    adopt_orphans()
    rows = []
    with tempfile.TemporaryDirectory(prefix="hivenb-bench-") as folder:
        kernel = Kernel(Path(folder))
        try:
            kernel.run(SET_UP)
            for _ in range(pairs):
                found = {}
                for name in ("closed", "opened"):
                    kernel.run(OPEN if name == "opened" else "pass")
                    found[name] = tuple(json.loads(kernel.run(f"print(block({seconds}))")))
                    kernel.run(CLOSE if name == "opened" else "pass")
                rows.append(Row(**found))
            kernel.run(END)
        finally:
            kernel.close()
    return rows


def measure_frame(points: int, repeat: int) -> Frame:
    history = History()
    values = np.random.default_rng(1).random(1000).tolist()
    began = time.perf_counter()
    for i in range(points):
        for name in SERIES:
            history.record(name, values[i % 1000], epoch=i // 100, samples=32 * i, time=float(i))
    record = (time.perf_counter() - began) / (points * len(SERIES))
    frame, axes = ChartImage(), AxesCharts(history.snapshot())
    seconds: dict[object, list[float]] = {frame: [], axes: []}
    for i in range(points, points + repeat + 1):
        for name in SERIES:
            history.record(name, values[i % 1000], epoch=i // 100, samples=32 * i, time=float(i))
        for image in (frame, axes):
            began = time.perf_counter()
            image.png(history.snapshot())
            seconds[image].append(time.perf_counter() - began)
    size = sum(_size(series) for series in history.snapshot().series.values())
    return Frame(points, record, seconds[frame][1:], seconds[axes][1:], size)  # the first one warms up


def _size(series: Series) -> int:
    held = [getattr(series, field.name) for field in fields(series)]
    return sum(array.nbytes for array in held if isinstance(array, np.ndarray))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--pairs", type=int, default=8, help="of blocks, without and with the dashboard")
    options.add_argument("--seconds", type=float, default=5.0, help="of each block")
    options.add_argument("--points", type=int, nargs="+", default=list(POINTS), help="recorded before a frame")
    given = options.parse_args(arguments)
    if given.quick:
        given.pairs, given.seconds, given.points = 2, 1.0, [1000, 10_000]
    print(machine())
    say("training, without and with the dashboard ...")
    rows = measure_training(given.pairs, given.seconds)
    cells = []
    for what, blocks in (("without", [row.closed for row in rows]), ("with", [row.opened for row in rows])):
        rate, cpu = (statistics.median(block[i] for block in blocks) for i in range(2))
        cells.append([f"{what} dashboard", f"{rate:.1f}", f"{cpu:.2f}"])
    print(table(["", "batches/s", "CPU, s/s"], cells))
    print(f"Throughput with the dashboard is {statistics.median(row.ratio for row in rows):.3f} of that without")
    frames = []
    for points in given.points:
        say(f"{points:,} points in each of {len(SERIES)} series ...")
        frames.append(measure_frame(points, 5))
    shown = [
        [
            frame.points,
            f"{1e6 * frame.record:.2f}",
            f"{1000 * statistics.median(frame.frame):.0f}",
            f"{1000 * statistics.median(frame.axes):.0f}",
            f"{frame.ratio:.1f}",
            f"{frame.size / 1000:.0f}",
        ]
        for frame in frames
    ]
    print(table(["points", "µs for a point", "ms for a frame", "ms with Axes", "ratio", "kB of history"], shown))
    write_json(given.json, rows, frames=[vars(frame) for frame in frames])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
