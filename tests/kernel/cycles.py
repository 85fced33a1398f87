"""Cells that a person runs again and again in one kernel: open a swarm, train, close. And what they leave behind."""

from __future__ import annotations

import json
from dataclasses import dataclass

from real_kernel import Kernel

IMPORTS = """
import gc, json, threading, time, psutil, torch, hivenb, tiny
torch.set_num_threads(1)

class Wide(tiny.TinyModel):  # 4 MB, so that one that is left behind is seen
    def __init__(self):
        super().__init__()
        self.ballast = torch.nn.Parameter(torch.zeros(1_000_000))

def threads():
    # but for pyzmq's own: it comes with the first message of 64 kB, such as a chart, and stays
    return sum(type(thread).__module__ != "zmq.utils.garbage" for thread in threading.enumerate())

fewest = None

def left():
    global fewest
    gc.collect()
    end = time.monotonic() + 10  # for those that are about to end
    while fewest is not None and threads() > fewest and time.monotonic() < end:
        time.sleep(0.05)
    fewest = threads() if fewest is None else min(fewest, threads())
    process = psutil.Process()
    return json.dumps([process.memory_full_info().uss, threads(), process.num_fds()])
"""

OPEN = """
swarm = hivenb.Swarm()
run = hivenb.TrainingRun(Wide(), tiny.loader(), swarm=swarm, accelerator="cpu",
                         options=hivenb.Options(target_batch_size=64, matchmaking_time=1.0))
"""

SHOW = """
dashboard = hivenb.Dashboard(run)
dashboard
"""

TRAIN = "run.start(); run.wait(epochs=2, timeout=60)"

#: By turns: people close one or the other.
CLOSE = ("swarm.close()", "run.stop(); dashboard.close(); swarm.close()")


#: Of a cycle, on the average of a few. One that is kept takes 13 descriptors, 2 threads and 50 MB; what hivemind shares
#: between processes comes and goes by a few descriptors, and the kernel's heap grows in the first dozen cycles.
FEW_DESCRIPTORS, FEW_BYTES = 2, 30e6


@dataclass(frozen=True)
class Left:
    """What a kernel has after a cycle.

    :param memory: bytes that are its own
    :param threads: number of them
    :param descriptors: number of open ones
    """

    memory: int
    threads: int
    descriptors: int


def run_cycles(kernel: Kernel, cycles: int, dashboard: bool = True) -> list[Left]:
    """What there is after each of so many cycles.

    :param dashboard: whether each shows one
    """
    kernel.run(IMPORTS)
    seen = []
    for number in range(cycles):
        kernel.run(OPEN)
        if dashboard:
            assert kernel.run(SHOW) == "Dashboard(run 'lightning_run')"
        assert kernel.run(TRAIN) == "waited for 2 swarm epochs\nTrue"
        kernel.run(CLOSE[number % 2 if dashboard else 0])
        kernel.strays.clear()
        seen.append(Left(*json.loads(kernel.run("print(left())"))))
    return seen


def grown(kernel: Kernel, warm_up: int, cycles: int) -> tuple[float, float, float]:
    """Descriptors, threads and bytes that a cycle leaves behind, on the average."""
    seen = run_cycles(kernel, 1 + warm_up + cycles)
    print(*seen, sep="\n")
    before, after = seen[warm_up], seen[-1]
    return (
        (after.descriptors - before.descriptors) / cycles,
        (after.threads - before.threads) / cycles,
        (after.memory - before.memory) / cycles,
    )
