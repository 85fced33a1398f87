"""Watches a long training for what grows: memory, threads and descriptors of the kernel and of all that it starts.

A real kernel trains with two local peers and an open dashboard, at the pace of people's models and with little
computing. Each minute all processes are looked at. Then cells that open, train and close are run again and again in
another kernel, with a dashboard and without one.

    python tests/benchmarks/soak.py --minutes 60 --json soak.json
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from swarm_bench import adopt_orphans, machine, parser, say, table, write_json

sys.path.append(str(Path(__file__).parents[1] / "kernel"))

from cycles import Left, run_cycles
from real_kernel import Kernel

SET_UP = """
import json, time, torch, hivenb, tiny
torch.set_num_threads(1)

class Paced(tiny.TinyModel):
    def __init__(self):
        super().__init__()
        self.more = torch.nn.Parameter(torch.zeros({parameters}))

    def training_step(self, batch, batch_idx):
        time.sleep({step})
        return super().training_step(batch, batch_idx) + (self.more**2).mean()

swarm = hivenb.Swarm()
run = hivenb.TrainingRun(Paced(), tiny.loader(count=4096, shuffle=True), swarm=swarm, accelerator="cpu",
                         options=hivenb.Options(target_batch_size={target}, matchmaking_time=2.0))
dashboard = hivenb.Dashboard(run)
_ = swarm.add_local_peers(2, run)
run.start()

def now():
    snapshot = run.history.snapshot()
    sizes = snapshot.series.get("group_size")
    groups = [] if sizes is None else [float(size) for size in sizes.values[-10:]]
    failed = sum(event.kind == "round" for event in snapshot.events)
    return json.dumps([run.status.epoch, run.status.num_peers, groups, failed])
"""
END = "run.stop(); swarm.close()"

PEERS, BATCH = 3, 8
#: Batches of each peer in an epoch, and epochs that all peers have been in before the first look.
BATCHES, SETTLED = 10, 10

#: Epochs after which growth counts.
WARM = 300

KERNEL, SERVER = "the kernel", "fork server"


@dataclass(frozen=True)
class Look:
    """All processes of one kind at one moment.

    :param seconds: since the first look
    :param epochs: of the swarm, since then
    :param role: what they are
    :param processes: number of them
    :param memory: bytes that are in no file, together. Those that a process shares with one it was forked from count:
      what is its own grows whenever one of the two writes, and no memory is used for it that was not
    :param threads: of all
    :param descriptors: of all
    """

    seconds: float
    epochs: int
    role: str
    processes: int
    memory: int
    threads: int
    descriptors: int


def look(kernel: psutil.Process, seconds: float, epochs: int) -> list[Look]:
    """The kernel and all its descendants, kind by kind."""
    sums: dict[str, Counter[str]] = {}
    for process, role in _family(kernel):
        try:
            with process.oneshot():
                threads, descriptors = process.num_threads(), process.num_fds()
            memory = _memory(process.pid)
        except (psutil.NoSuchProcess, FileNotFoundError):
            continue
        found = Counter(processes=1, memory=memory, threads=threads, descriptors=descriptors)
        sums[role] = sums.get(role, Counter()) + found
    return [Look(seconds, epochs, role, **figures) for role, figures in sums.items()]


def _memory(pid: int) -> int:
    """https://man7.org/linux/man-pages/man5/proc_pid_status.5.html"""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(1024 * int(line[1]) for line in lines if line[0] in ("RssAnon:", "RssShmem:", "VmSwap:"))


def _family(kernel: psutil.Process) -> Iterator[tuple[psutil.Process, str]]:
    yield kernel, KERNEL
    for child in kernel.children():
        if child.status() == psutil.STATUS_ZOMBIE:  # it has just ended, as what looks for a device does
            continue
        command = " ".join(child.cmdline())
        if "forkserver" in command:
            yield child, SERVER
            for peer in child.children():
                yield peer, "local peers"
                yield from _parts(peer, "their ")
        elif "resource_tracker" not in command:
            yield from _part(child, "its ")


def _parts(owner: psutil.Process, whose: str) -> Iterator[tuple[psutil.Process, str]]:
    for child in owner.children():
        yield from _part(child, whose)


def _part(process: psutil.Process, whose: str) -> Iterator[tuple[psutil.Process, str]]:
    if "torch_shm_manager" in process.name():  # of torch's, and does nothing
        return
    daemons = [child for child in process.children() if "p2pd" in child.name()]
    yield process, whose + ("DHT" if daemons else "averagers")
    for daemon in daemons:
        yield daemon, whose + "p2pd"


@contextmanager
def a_kernel() -> Iterator[Kernel]:
    with tempfile.TemporaryDirectory(prefix="hivenb-bench-") as folder:
        kernel = Kernel(Path(folder))
        try:
            yield kernel
        finally:
            kernel.close()


def soak(minutes: float, epoch: float, parameters: int) -> tuple[list[Look], dict[str, Any]]:
    """All looks, and how the training went.

    :param epoch: seconds that one takes
    :param parameters: of the model, so that there is something to send
    """
    looks: list[Look] = []
    with a_kernel() as kernel:
        kernel.run(SET_UP.format(step=epoch / BATCHES, target=PEERS * BATCHES * BATCH, parameters=parameters))
        kernel.run("dashboard")
        first, peers, groups, _ = _now(kernel)
        while groups[-SETTLED:] != [PEERS] * SETTLED:
            time.sleep(epoch)
            first, peers, groups, _ = _now(kernel)
        began, used = time.monotonic(), _cpu_seconds(kernel)
        while True:
            passed = time.monotonic() - began
            reached, peers, groups, failed = _now(kernel)
            looks += look(kernel.process, passed, reached - first)
            say(f"{passed / 60:5.1f} min, epoch {reached}, {peers} peers, groups of {min(groups):.0f} and more")
            if passed >= 60 * minutes:
                break
            time.sleep(min(60.0, 60 * minutes - passed))
        cpu = (_cpu_seconds(kernel) - used) / passed
        kernel.run(END)
    return looks, {"epochs": reached - first, "failed": failed, "peers": peers, "cpu": cpu}


def _now(kernel: Kernel) -> list[Any]:
    kernel.strays.clear()  # what the dashboard has sent
    return json.loads(kernel.run("print(now())"))


def _cpu_seconds(kernel: Kernel) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in kernel.family()))


def growth(looks: Sequence[Look]) -> float:
    """Bytes by which each process of one kind grows in a hundred epochs: the median of the slopes between any two looks
    (Theil-Sen), as what a round needs comes and goes.
    """
    settled = [one for one in looks if one.epochs >= WARM]
    slopes = [
        (later.memory - earlier.memory) / max(1, later.processes) / (later.epochs - earlier.epochs)
        for earlier, later in itertools.combinations(settled if len(settled) > 1 else looks, 2)
        if later.epochs > earlier.epochs
    ]
    return 100 * median(slopes) if slopes else 0.0


def print_looks(looks: Sequence[Look], course: dict[str, Any]) -> None:
    times = sorted({one.seconds for one in looks})
    early = min(times, key=lambda seconds: abs(seconds - min(600.0, times[-1] / 2)))
    marks = (times[0], early, times[-1])
    rows = []
    for role in dict.fromkeys(one.role for one in looks):
        at = {one.seconds: one for one in looks if one.role == role}
        three = [at.get(mark, Look(mark, 0, role, 0, 0, 0, 0)) for mark in marks]
        rows.append(
            [
                f"{role} ({three[2].processes})",
                *(f"{one.memory / 1e6:.1f}" for one in three),
                f"{growth(list(at.values())) / 1e6:.3f}",
                " ".join(str(one.threads) for one in three),
                " ".join(str(one.descriptors) for one in three),
            ]
        )
    heads = [f"MB after {mark / 60:.0f} min" for mark in marks]
    print(table(["processes", *heads, "MB in 100 epochs, each", "threads", "descriptors"], rows))
    print(
        f"{course['epochs']} epochs, {course['failed']} rounds failed, {course['peers']} peers at the end, "
        f"{course['cpu']:.2f} s of CPU time a second"
    )


def print_cycles(with_dashboard: Sequence[Left], without: Sequence[Left]) -> None:
    rows = []
    for name, seen in (("with a dashboard", with_dashboard), ("without", without)):
        for number in sorted({0, len(seen) // 5, len(seen) - 1}):
            one = seen[number]
            rows.append([name, number + 1, f"{one.memory / 1e6:.1f}", one.threads, one.descriptors])
    print(table(["cycles", "after", "MB", "threads", "descriptors"], rows))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--minutes", type=float, default=60.0, help="to train")
    options.add_argument("--epoch", type=float, default=2.5, help="seconds that one takes")
    options.add_argument("--parameters", type=int, default=300_000, help="of the model")
    options.add_argument("--cycles", type=int, default=50, help="of opening, training, closing, each way")
    given = options.parse_args(arguments)
    if given.quick:
        given.minutes, given.epoch, given.cycles = 0.2, 1.0, 2
    adopt_orphans()
    print(machine())
    looks, course = soak(given.minutes, given.epoch, given.parameters)
    print_looks(looks, course)
    write_json(given.json, looks, course=course)  # whatever becomes of the rest
    cycles: dict[str, list[Left]] = {"with": [], "without": []}
    if given.cycles:
        for way, seen in cycles.items():
            say(f"{given.cycles} cycles, {way} a dashboard ...")
            with a_kernel() as kernel:
                seen += run_cycles(kernel, given.cycles, dashboard=way == "with")
        print_cycles(cycles["with"], cycles["without"])
    write_json(
        given.json, looks, course=course, cycles={way: [asdict(one) for one in seen] for way, seen in cycles.items()}
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
