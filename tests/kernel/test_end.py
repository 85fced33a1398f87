"""The end of a kernel, however it comes: nothing of it is left."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

from hivenb.peers.fork_server import VARIABLE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EVERYTHING = """
import hivenb, tiny
swarm = hivenb.Swarm()
run = hivenb.TrainingRun(tiny.PacedModel(), tiny.loader(), swarm=swarm, accelerator="cpu",
                         options=hivenb.Options(target_batch_size=64, matchmaking_time=2.0))
peers = swarm.add_local_peers(1, run)
run.start()
assert run.wait(epochs=2, timeout=60)
"""


def names(processes: list[psutil.Process]) -> list[str]:
    return [" ".join(process.cmdline())[:120] for process in processes]


#: Peers are forked from a copy of the kernel but for one way to end: a server of their own imports all once more.
HAS_A_SERVER = "kernel"

COPIED = f"import os; os.environ[{VARIABLE!r}] = '1'"


# That its whole group is killed leaves less to end than that it is killed alone; one with a copy is killed below, too.
@pytest.mark.parametrize(
    "how",
    [
        HAS_A_SERVER,
        pytest.param("copied kernel", marks=pytest.mark.long),
        pytest.param("group", marks=pytest.mark.long),
        "shutdown",
    ],
)
def test_nothing_outlives_the_kernel(kernel, how):
    if how != HAS_A_SERVER:
        kernel.run(COPIED)
    kernel.run(EVERYTHING)
    family = kernel.family()
    daemons = [process for process in family if process.name().startswith("p2pd")]
    assert len(daemons) == 2
    assert {os.getsid(daemon.pid) for daemon in daemons}.isdisjoint({os.getsid(kernel.process.pid)})
    assert len(family) >= 1 + 2 * 4 + 2 + 1
    if how.endswith("kernel"):
        os.kill(kernel.process.pid, signal.SIGKILL)
    elif how == "group":
        os.killpg(os.getpgid(kernel.process.pid), signal.SIGKILL)
    else:
        kernel.manager.shutdown_kernel()  # asks it to end, and kills it if it has not after five seconds
    if how != "shutdown":
        kernel.manager.provisioner.process.wait(60)
    _, alive = psutil.wait_procs(family, timeout=10)
    assert names(alive) == []


def test_a_kernel_killed_while_everything_starts_leaves_nothing(kernel):
    kernel.run(COPIED)
    cell = kernel.begin(EVERYTHING)
    family: set[psutil.Process] = set()
    while len(family) < 7:  # the first local peer is there
        time.sleep(0.02)
        family |= set(kernel.family())
    os.kill(kernel.process.pid, signal.SIGKILL)
    kernel.manager.provisioner.process.wait(60)
    _, alive = psutil.wait_procs(list(family), timeout=10)
    assert names(alive) == []
    assert cell
