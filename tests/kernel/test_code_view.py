"""What the Code tab shows runs as it stands in a cell: before the run, beside it while it trains, and after it."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.process

CELLS = """
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


def test_the_code_runs_in_a_cell_beside_the_living_run(kernel) -> None:
    kernel.run(CELLS)
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
