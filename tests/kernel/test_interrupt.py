"""The interrupt button: ends the cell that runs, and nothing else."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import psutil
import pytest
from real_kernel import CellError, Kernel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SWARM = """
import time, hivenb, tiny
swarm = hivenb.Swarm()
run = hivenb.TrainingRun(tiny.in_large_batches(tiny.PacedModel()), tiny.large_batches(), swarm=swarm, accelerator="cpu",
                         options=hivenb.Options(target_batch_size=256, matchmaking_time=2.0))
"""


#: Seconds within which processes are gone that were ended.
GONE_WITHIN = 20.0

BUSY = ("while True: pass", "time.sleep(60)")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory) -> Iterator[Kernel]:
    """One for all tests, in the order in which they stand: each closes its swarm, and the imports take longest."""
    started = Kernel(tmp_path_factory.mktemp("kernel"))
    try:
        yield started
    finally:
        started.close()


def interrupt_while(kernel, code: str, after: float = 0.3) -> float:
    """Interrupt a cell once it has said so, and return the seconds until it had ended with KeyboardInterrupt.

    :param after: seconds that it is given to get into what it does
    """
    cell = kernel.begin(f"print('now', flush=True)\n{code}")
    while True:
        message = kernel.client.get_iopub_msg(timeout=60)
        if message["msg_type"] == "stream" and message["content"]["text"].startswith("now"):
            break
    time.sleep(after)
    return interrupt(kernel, cell)


def interrupt(kernel, cell: str) -> float:
    """Interrupt a cell that runs, and return the seconds until it had ended with KeyboardInterrupt."""
    started = time.monotonic()
    kernel.interrupt()
    with pytest.raises(CellError, match="KeyboardInterrupt"):
        kernel.finish(cell)
    return time.monotonic() - started


def test_interrupts_reach_the_cell_before_hivenb_is_there(kernel):
    kernel.run("import time")
    for code in BUSY:
        assert interrupt_while(kernel, code) < 5


def passing(kernel) -> set[psutil.Process]:
    """Descendants of the kernel, but for those of its children that are started once and stay."""
    stay = {"forkserver", "resource_tracker", "torch_shm_manager"}
    while True:
        with contextlib.suppress(psutil.NoSuchProcess):  # one has ended meanwhile
            children = kernel.process.children()  # what is forked from the server has its command line
            staying = {child for child in children if any(name in " ".join(child.cmdline()) for name in stay)}
            return set(kernel.family()) - {kernel.process} - staying


def assert_gone_but_for(kernel, before: set[psutil.Process]) -> None:
    end = time.monotonic() + GONE_WITHIN
    while (now := passing(kernel)) != before and time.monotonic() < end:
        time.sleep(0.1)
    assert now == before, [(p.pid, p.ppid(), p.cmdline()) for p in now - before]


def test_an_interrupt_while_peers_start_leaves_none(kernel):
    kernel.run(SWARM)
    before = passing(kernel)
    for _ in ("while their server starts", "while they start"):
        interrupt_while(kernel, "swarm.add_local_peers(2, run)")
        assert kernel.run("swarm.local_peers") == "()"
        assert_gone_but_for(kernel, before)
        kernel.run("swarm.add_local_peers(1, run)")
        kernel.run("swarm.remove_local_peers()")
        assert_gone_but_for(kernel, before)
    kernel.run("swarm.close()")


def test_an_interrupt_while_a_swarm_starts_leaves_it_open_or_nothing_of_it(kernel):
    kernel.run("import time, hivenb; hivenb.Swarm  # and so what it needs")
    for after in (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8):
        interrupt_while(kernel, "hivenb.Swarm(); time.sleep(60)", after)
        kernel.run("hivenb.Swarm().close()")  # the same one, or another one that takes its place
        assert_gone_but_for(kernel, set())


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """Who listens, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        yield listener


def test_an_interrupt_while_nobody_answers_whom_a_swarm_joins_leaves_nothing_of_it(kernel, silent):
    somebody = "12D3KooWBYsfAGTPynrWwcqLwTeUV6pVf6vkFZXqaHW1kzHVWrgs"
    address = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{somebody}"
    kernel.run("import hivenb")
    cell = kernel.begin(f"hivenb.Swarm.join([{address!r}])")
    called, _ = silent.accept()
    with called:
        interrupt(kernel, cell)
    assert_gone_but_for(kernel, set())
    assert kernel.run("hivenb.Swarm().is_open") == "True"
    kernel.run("hivenb.Swarm().close()")


def test_an_interrupt_while_a_swarm_closes_leaves_nothing_of_it(kernel):
    kernel.run("import hivenb; swarm = hivenb.Swarm()")
    psutil.Process(int(kernel.run("swarm.dht.pid"))).suspend()  # so that it does not leave
    interrupt_while(kernel, "swarm.close()")
    kernel.run("swarm.close()")  # which ends nothing that the other one knew of
    assert_gone_but_for(kernel, set())
    assert kernel.run("hivenb.Swarm().is_open") == "True"
    kernel.run("hivenb.Swarm().close()")


def test_interrupts_reach_the_cell_and_nothing_else(kernel):
    kernel.run(SWARM)
    for code in BUSY:  # with a swarm
        assert interrupt_while(kernel, code) < 5
    kernel.run("swarm.add_local_peers(1, run); run.start(); assert run.wait(epochs=1, timeout=60)")
    family = set(kernel.family())
    assert len(family) >= 11
    for code in ["run.wait()", "run.wait(epochs=100_000, timeout=60)", *BUSY]:  # while training
        assert interrupt_while(kernel, code) < 5
        assert (
            kernel.run("print(run.status.state.value, run.wait(epochs=2, timeout=60))")
            == "waited for 2 swarm epochs\ntraining True\n"
        )
    assert [p for p in family if not p.is_running() or p.status() == psutil.STATUS_ZOMBIE] == []
    assert kernel.run("[peer.state for peer in swarm.local_peers]") == "['training']"
    kernel.run("run.pause(); assert run.wait_for(hivenb.training.RunState.PAUSED, 60)")
    assert interrupt_while(kernel, "run.wait()") < 5
    kernel.run("run.stop()")
    for code in BUSY:  # after training
        assert interrupt_while(kernel, code) < 5
    kernel.run("run.start(); assert run.wait(epochs=1, timeout=60)")
    kernel.run("swarm.close()")
    for code in BUSY:  # after the swarm
        assert interrupt_while(kernel, code) < 5
