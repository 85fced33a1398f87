"""What the quickstart takes of a free notebook's memory, all its processes together."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]

#: Bytes. 1.2 GB with the packages that Binder installs; those of the tests are some more, which Lightning imports.
LIMIT = 1.26e9


@pytest.fixture
def environment_of_binder(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``binder/start`` sets before it starts Jupyter."""
    start = Path(__file__).resolve().parents[2] / "binder" / "start"
    if not start.is_file():
        pytest.skip("the tests run apart from the source tree")
    settings = re.findall(r"^export (\w+)=(\w+)$", start.read_text(), re.MULTILINE)
    assert settings
    for name, value in settings:
        monkeypatch.setenv(name, value)


def test_the_quickstart_with_two_local_peers_fits_into_a_free_notebook(environment_of_binder, kernel, capsys):
    kernel.run(
        """
import hivenb
from hivenb.tasks import digits
task = digits()
swarm = hivenb.Swarm()
run = hivenb.TrainingRun(task.model, (task.train, task.validation), swarm=swarm, accelerator="cpu",
                         options=hivenb.Options(target_batch_size=task.target_batch_size, matchmaking_time=2.0))
dashboard = hivenb.Dashboard(run)
"""
    )
    assert kernel.run("dashboard") == "Dashboard(run 'lightning_run')"
    kernel.run("swarm.add_local_peers(2, run); run.start()")
    peaks: dict[psutil.Process, int] = {}
    total = 0
    for _ in range(4):
        assert kernel.run("run.wait(epochs=2, timeout=100)") == "waited for 2 swarm epochs\nTrue"
        sizes = {process: proportional_bytes(process) for process in kernel.family()}
        peaks |= {process: max(size, peaks.get(process, 0)) for process, size in sizes.items()}
        total = max(total, sum(sizes.values()))
    assert kernel.run("run.status.num_peers") == "3"
    with capsys.disabled():
        print(f"\nproportional set size, {total / 1e6:.0f} MB in all:")
        for process, size in sorted(peaks.items(), key=lambda item: -item[1]):
            print(f"{size / 1e6:7.0f} MB  {' '.join(process.cmdline())[-70:]}")
    kernel.run("dashboard.close(); run.stop(); swarm.close()")
    assert total < LIMIT


def proportional_bytes(process: psutil.Process) -> int:
    """Memory of a process, with what it shares divided by the number of those that share it."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
