"""Each notebook, whose kernel is killed in the middle of a cell in the middle of it: nothing is left."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import nbformat
import psutil
import pytest
import real_kernel
from real_kernel import Kernel

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"

#: Seconds into the cell.
IN_THE_MIDDLE = 3.0


def family_of(kernel: Kernel, seconds: float) -> set[psutil.Process]:
    """All that are seen for so long."""
    seen: set[psutil.Process] = set()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        seen |= set(kernel.family())
        time.sleep(0.05)
    return seen


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_nothing_is_left_of_a_notebook_whose_kernel_is_killed(
    path: Path, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real_kernel, "PATIENCE", 300.0)  # a comparison is a cell
    cells = [cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    first_half, cut = cells[: len(cells) // 2], cells[len(cells) // 2]
    for source in first_half:
        kernel.run(source)
    kernel.begin(cut)
    family = family_of(kernel, IN_THE_MIDDLE)
    print(path.stem, "cell", len(first_half) + 1, "of", len(cells), "with", len(family), "processes")
    os.kill(kernel.process.pid, signal.SIGKILL)
    kernel.manager.provisioner.process.wait(60)
    _, alive = psutil.wait_procs(list(family), timeout=10)
    left = []
    for one in alive:
        with suppress(psutil.NoSuchProcess):  # it ends just now
            left.append(" ".join(one.cmdline())[:120])
    assert left == []
