"""Measures how long it takes until training begins: imports, the DHT, the first step of two peers, the first picture.

Each in a fresh process. What hivenb adds to an import, and to the start of a DHT, is seen beside what it is built on.

    python tests/benchmarks/startup.py --json startup.json
"""

from __future__ import annotations

import inspect
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarm_bench import machine, parser, say, table, write_json

#: What a process does before the clock starts, and then.
SNIPPETS = {
    "python": ("", "pass"),
    "import torch": ("", "import torch"),
    "import lightning": ("import torch", "import lightning"),
    "import hivemind, after torch": ("import torch", "import hivemind"),
    "import hivenb": ("", "import hivenb"),
    "import hivenb.strategy": ("", "import hivenb.strategy"),
    "import hivenb.strategy, after lightning and hivemind": (
        "import lightning, hivemind",
        "import hivenb.strategy",
    ),
    "import hivenb.view.dashboard": ("import hivenb", "import hivenb.view.dashboard"),
    "DHT of hivemind": (
        "import hivemind",
        'made = hivemind.DHT(host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)',
        "made.shutdown()",
    ),
    "hivenb.Swarm()": ("import hivenb, hivemind, torch", "made = hivenb.Swarm()", "made.close()"),
}
QUICK = ("python", "import hivenb", "hivenb.Swarm()")


def two_peers() -> dict[str, float]:
    """A run in this process and a local peer; runs in a fresh process, and so imports for itself."""
    import time

    import hivenb.strategy  # so that imports do not count
    from hivenb import tasks
    from hivenb.view.charts import drawing as charts

    task = tasks.digits()
    with hivenb.Swarm() as swarm:
        options = hivenb.Options(target_batch_size=64)
        run = hivenb.TrainingRun(task.model, task.train, swarm=swarm, options=options)
        began = time.perf_counter()
        swarm.add_local_peers(1, run)
        added = time.perf_counter()
        run.start()
        run.wait(steps=1)
        first_batch = time.perf_counter()
        run.wait(epochs=1)
        first_step = time.perf_counter()
        while run.strategy is None or run.strategy.num_peers < 2:
            time.sleep(0.01)
        met = time.perf_counter()
        run.wait(epochs=3)
        drawing = time.perf_counter()
        image = charts.ChartImage()
        image.png(run.history.snapshot())
        drawn = time.perf_counter()
        image.png(run.history.snapshot())
        again = time.perf_counter()
        run.stop()
    return {
        "add_local_peers(1), until it returns": added - began,
        "run.start() to the first batch": first_batch - added,
        "run.start() to the first optimizer step": first_step - added,
        "run.start() to both peers seen": met - added,
        "first picture": drawn - drawing,
        "second picture": again - drawn,
    }


@dataclass(frozen=True)
class Row:
    """Seconds that something takes, in each of the repetitions."""

    what: str
    seconds: list[float]


def measure_snippet(before: str, timed: str, after: str = "") -> float:
    """Seconds of a piece of code in a fresh process."""
    code = f"{before}\nimport time\nbegan = time.perf_counter()\n{timed}\nprint(time.perf_counter() - began)\n{after}"
    return float(_fresh(code))


def measure_two_peers() -> dict[str, float]:
    return json.loads(_fresh(_as_code(two_peers)))


def _as_code(function: Callable[[], dict[str, float]]) -> str:
    call = f"print(json.dumps({function.__name__}()))"
    return f"from __future__ import annotations\nimport json\n{inspect.getsource(function)}\n{call}"


def _fresh(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"A process ended with {done.returncode}: {done.stderr}")
    return done.stdout.splitlines()[-1]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--repeat", type=int, default=3, help="fresh processes for each; the median counts")
    given = options.parse_args(arguments)
    repeat = 1 if given.quick else given.repeat
    print(machine())
    rows = []
    for what, snippet in SNIPPETS.items():
        if not given.quick or what in QUICK:
            say(f"{what} ...")
            rows.append(Row(what, [measure_snippet(*snippet) for _ in range(repeat)]))
    say("two peers ...")
    runs = [measure_two_peers() for _ in range(repeat)]
    rows += [Row(what, [run[what] for run in runs]) for what in runs[0]]
    cells = [
        [row.what, f"{statistics.median(row.seconds):.2f}", f"{min(row.seconds):.2f}", f"{max(row.seconds):.2f}"]
        for row in rows
    ]
    print(table(["", "median, s", "least", "most"], cells))
    write_json(given.json, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
