"""Cells as people run them: twice, in between, and with nothing but their own output."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from cycles import FEW_BYTES, FEW_DESCRIPTORS, grown
from real_kernel import Kernel

from hivenb.peers.fork_server import VARIABLE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SWARM = """
import hivenb, tiny
swarm = hivenb.Swarm()
swarm
"""

RUN = """
class Model(tiny.PacedModel):  # of this notebook alone
    pass

data = tiny.loader(256, tiny.LARGE_BATCH), tiny.loader(seed=1)
run = hivenb.TrainingRun(tiny.in_large_batches(Model()), data, swarm=swarm, accelerator="cpu",
                         options=hivenb.Options(target_batch_size=256, matchmaking_time=2.0, verbose=True))
run
"""

CODE_VIEW = """
import lightning
import hivenb
from hivenb.view.dashboard_state import DashboardState
from tiny import PacedModel, loader

model = PacedModel()
train_loader, val_loader = loader(64, 16), loader(16, 16)
swarm = hivenb.Swarm()
run = hivenb.TrainingRun(
    model, (train_loader, val_loader), swarm=swarm, options=hivenb.Options(target_batch_size=16),
    max_epochs=100_000, gradient_clip_val=0.5,
)
"""

#: Runs it here, as it stands but for its end.
EXECUTE = """
text = DashboardState.of(run).options.code
assert "max_epochs=100000" in text and "gradient_clip_val=0.5" in text
exec(text.replace("max_epochs=100000", "max_epochs=1, logger=False, enable_progress_bar=False"))
strategy.hivemind_epoch, "copy" in text
"""

REFUSED = """
try:
    exec(before.replace("max_epochs=100000", "max_epochs=1, logger=False, enable_progress_bar=False"))
except hivenb.errors.TrainingError as e:
    print(e)
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory) -> Iterator[Kernel]:
    """One for all tests: each closes its swarm, and the imports take longest; so local peers are forked from a copy."""
    started = Kernel(tmp_path_factory.mktemp("kernel"))
    try:
        started.run(f"import os; os.environ[{VARIABLE!r}] = '1'")
        yield started
    finally:
        started.close()


def test_a_notebook_from_top_to_bottom_and_again(kernel):
    assert kernel.run(SWARM) == "Swarm('default', open, this machine only, invited only)"
    daemons = [p for p in kernel.family() if p.name().startswith("p2pd")]
    for run_id in ("lightning_run", "lightning_run-2"):  # a model that was made anew is a run of its own
        assert kernel.run("before = swarm" + SWARM) == "Swarm('default', open, this machine only, invited only)"
        assert kernel.run("swarm is before") == "True"
        assert kernel.run(RUN) == f"TrainingRun(Model, ready, run_id='{run_id}')"
        assert kernel.run("[peer.state for peer in swarm.add_local_peers(1, run)]") == "['ready']"
        assert kernel.run("run.start()") == ""
        assert (
            kernel.run("print('mine'); ended = run.wait(epochs=3, timeout=60); print(ended)")
            == "mine\nwaited for 3 swarm epochs\nTrue\n"
        )
        for number in range(5):
            assert kernel.run(f"print({number})") == f"{number}\n"
            time.sleep(0.2)  # an idle kernel, in which whatever is printed belongs to the last cell
        assert kernel.run("run.stop(); swarm.remove_local_peers()") == ""
        assert [p for p in kernel.family() if p.name().startswith("p2pd")] == daemons
    assert kernel.run("swarm.close(); swarm") == "Swarm('default', closed)"
    assert stray(kernel) == []


def test_background_work_writes_into_no_cell(kernel):
    kernel.run("import hivenb, tiny, lightning, warnings, sys, threading, os, time")
    kernel.run(
        """
class Loud(tiny.PacedModel):
    def configure_optimizers(self):
        warnings.warn("a warning of the background")
        lightning.pytorch.utilities.rank_zero_info("some information of the background")
        return super().configure_optimizers()
swarm = hivenb.Swarm()
data = tiny.loader(256, tiny.LARGE_BATCH), tiny.loader(seed=1)
run = hivenb.TrainingRun(tiny.in_large_batches(Loud()), data, swarm=swarm, accelerator="cpu",
                         options=hivenb.Options(target_batch_size=256, matchmaking_time=2.0, verbose=True))
peers = swarm.add_local_peers(1, run)
"""
    )
    assert kernel.run("run.start()") == ""
    assert kernel.run("run.wait(epochs=1, timeout=60)") == "waited for 1 swarm epoch\nTrue"
    log = kernel.run("print('\\n'.join(run.log_lines))")  # before a talkative swarm has pushed it out
    assert "a warning of the background" in log
    assert "some information of the background" in log
    assert kernel.run("run.wait(epochs=2, timeout=60)") == "waited for 2 swarm epochs\nTrue"
    assert kernel.run("peers[0].kill()") == ""
    assert kernel.run("run.wait(epochs=2, timeout=60)") == "waited for 2 swarm epochs\nTrue"
    assert kernel.run("run.pause(); run.resume(); run.stop()") == ""
    assert kernel.run("swarm.close()") == ""
    time.sleep(1.0)
    assert kernel.run("print('the end')") == "the end\n"
    assert stray(kernel) == []


def test_the_code_of_the_code_tab_runs_in_a_cell_before_beside_and_after_the_living_run(kernel):
    kernel.run(CODE_VIEW)
    assert kernel.run(EXECUTE).endswith("(4, False)")
    kernel.run("before = text\nrun.start()\nimport hivenb.errors")
    assert kernel.run("run.wait(epochs=2, timeout=60)").endswith("True")
    assert kernel.run(EXECUTE).endswith("(4, True)")
    assert "is being trained already, by the run 'lightning_run'" in kernel.run(REFUSED)
    assert kernel.run("run.wait(epochs=2, timeout=60), run.status.state.value").endswith("(True, 'training')")
    kernel.run("run.stop()")
    assert kernel.run("print(run.exception, 'configure_gradient_clipping' in vars(model))") == "None False\n"
    assert kernel.run(EXECUTE).endswith("(4, False)")
    kernel.run("swarm.close()")


def test_a_few_cycles_leave_nothing_behind(kernel):
    """The last one: by now the kernel's heap has grown to what it needs."""
    descriptors, threads, size = grown(kernel, warm_up=1, cycles=3)
    assert descriptors <= FEW_DESCRIPTORS
    assert threads == 0
    assert size <= FEW_BYTES


def stray(kernel) -> list[str]:
    """Output that came when no cell ran that :meth:`Kernel.run` waited for."""
    return [m["content"]["text"] for m in kernel.strays if m["msg_type"] == "stream"]
