"""The cells of a training, run again and again in one kernel: nothing of the last time is left but its picture."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

IMPORTS = """
import gc, json, threading, psutil, torch, hivenb, tiny
torch.set_num_threads(1)

class Wide(tiny.TinyModel):  # 4 MB, so that one that is left behind is seen
    def __init__(self):
        super().__init__()
        self.ballast = torch.nn.Parameter(torch.zeros(1_000_000))

def figures():
    gc.collect()
    process = psutil.Process()
    return json.dumps([process.num_fds(), threading.active_count(), process.memory_full_info().uss])
"""

OPEN = """
swarm = hivenb.Swarm()
run = hivenb.TrainingRun(Wide(), tiny.loader(), swarm=swarm, accelerator="cpu",
                         options=hivenb.Options(target_batch_size=64, matchmaking_time=1.0))
dashboard = hivenb.Dashboard(run)
dashboard
"""

TRAIN = "run.start(); run.wait(epochs=2, timeout=60)"

#: Of a cycle, on the average of a few. One that is kept takes 13 descriptors, 2 threads and 50 MB; what hivemind shares
#: between processes comes and goes by a descriptor or two, and memory by some megabytes.
FEW_DESCRIPTORS, FEW_BYTES = 2, 10e6


def cost_of_a_cycle(kernel: Any, warm_up: int, cycles: int) -> tuple[float, float, float]:
    """Descriptors, threads and bytes that each cycle leaves behind."""
    kernel.run(IMPORTS)
    seen = []
    for number in range(1 + warm_up + cycles):
        assert kernel.run(OPEN) == "Dashboard(run 'lightning_run')"
        assert kernel.run(TRAIN) == "True"
        kernel.run("swarm.close()" if number % 2 else "run.stop(); dashboard.close(); swarm.close()")
        seen.append(json.loads(kernel.run("print(figures())")))
    before, after = seen[warm_up], seen[-1]
    print(*seen, sep="\n")
    descriptors, threads, size = ((new - old) / cycles for old, new in zip(before, after, strict=True))
    return descriptors, threads, size


def test_a_few_cycles_leave_nothing_behind(kernel: Any) -> None:
    descriptors, threads, size = cost_of_a_cycle(kernel, warm_up=2, cycles=4)
    assert descriptors <= FEW_DESCRIPTORS
    assert threads == 0
    assert size <= FEW_BYTES


@pytest.mark.long
@pytest.mark.timeout(900)
def test_fifty_cycles_cost_nothing(kernel: Any) -> None:
    descriptors, threads, size = cost_of_a_cycle(kernel, warm_up=10, cycles=50)
    assert descriptors <= FEW_DESCRIPTORS / 10
    assert threads == 0
    assert size <= FEW_BYTES / 10
