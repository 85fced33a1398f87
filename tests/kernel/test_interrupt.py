"""The interrupt button: ends the cell that runs, and nothing else."""

from __future__ import annotations

import time

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SWARM = """
import time, hivenb, tiny
swarm = hivenb.Swarm()
run = hivenb.TrainingRun(tiny.TinyModel(), tiny.loader(), swarm=swarm, accelerator="cpu",
                         options=hivenb.Options(target_batch_size=32, matchmaking_time=2.0))
"""


def interrupt_while(kernel, code: str) -> float:
    """Interrupt a cell once it has said so, and return the seconds until it had ended with KeyboardInterrupt."""
    from real_kernel import CellError

    cell = kernel.begin(f"print('now', flush=True)\n{code}")
    while True:
        message = kernel.client.get_iopub_msg(timeout=60)
        if message["msg_type"] == "stream" and message["content"]["text"].startswith("now"):
            break
    time.sleep(0.3)  # into what follows
    started = time.monotonic()
    kernel.interrupt()
    with pytest.raises(CellError, match="KeyboardInterrupt"):
        kernel.finish(cell)
    return time.monotonic() - started


def test_interrupts_reach_the_cell_and_nothing_else(kernel):
    busy = ["while True: pass", "time.sleep(60)"]
    kernel.run("import time")
    for code in busy:  # before hivenb
        assert interrupt_while(kernel, code) < 5
    kernel.run(SWARM)
    for code in busy:  # with a swarm
        assert interrupt_while(kernel, code) < 5
    kernel.run("swarm.add_local_peers(1, run); run.start(); assert run.wait(epochs=1, timeout=60)")
    family = set(kernel.family())
    assert len(family) >= 11
    for code in ["run.wait()", "run.wait()", "run.wait(epochs=100_000, timeout=60)", *busy]:  # while training
        assert interrupt_while(kernel, code) < 5
        assert (
            kernel.run("print(run.status.state.value, run.wait(epochs=2, timeout=60))")
            == "waited for 2 epochs\ntraining True\n"
        )
    assert [p for p in family if not p.is_running() or p.status() == psutil.STATUS_ZOMBIE] == []
    assert kernel.run("[peer.state for peer in swarm.local_peers]") == "['training']"
    kernel.run("run.pause(); assert run.wait_for(hivenb.training.RunState.PAUSED, 60)")
    assert interrupt_while(kernel, "run.wait()") < 5
    kernel.run("run.stop()")
    for code in busy:  # after training
        assert interrupt_while(kernel, code) < 5
    kernel.run("run.start(); assert run.wait(epochs=1, timeout=60)")
    kernel.run("swarm.close()")
    for code in busy:  # after the swarm
        assert interrupt_while(kernel, code) < 5


def test_an_interrupt_while_peers_start_leaves_none(kernel):
    kernel.run(SWARM)
    before = set(kernel.family())
    assert interrupt_while(kernel, "swarm.add_local_peers(2, run)") < 30
    assert kernel.run("swarm.local_peers") == "()"
    household = ("forkserver", "resource_tracker", "torch_shm_manager")
    new = [p for p in set(kernel.family()) - before if not any(name in " ".join(p.cmdline()) for name in household)]
    assert psutil.wait_procs(new, timeout=10)[1] == []
    assert kernel.run("len(swarm.add_local_peers(1, run))") == "1"
