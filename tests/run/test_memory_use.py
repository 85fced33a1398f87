"""The memory of one thing after the other, each on its own, although a process' own peak only rises."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from hivenb.run.monitor import MemoryUse

MB = 1_000_000


def test_what_was_taken_before_does_not_count() -> None:
    kept = torch.ones(25 * MB)
    first = MemoryUse()
    ballast = torch.ones(50 * MB)
    first.look()
    del ballast
    first.look()
    assert 190 * MB < first.peak < 260 * MB
    second = MemoryUse()
    second.look()
    assert second.peak < 20 * MB
    assert second.gpu_peak is None or second.gpu_peak == 0
    assert len(kept) == 25 * MB


@pytest.mark.process
def test_processes_that_are_started_meanwhile_count() -> None:
    code = "import sys; kept = b'x' * 100_000_000; print('there', flush=True); sys.stdin.read()"

    def start() -> subprocess.Popen[str]:
        child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "there\n"
        return child

    before = start()
    use = MemoryUse()
    child = start()
    use.look()
    for one in (before, child):
        one.communicate(timeout=30)
    use.look()
    assert 95 * MB < use.peak < 180 * MB, "one of two, and without what it shares with others"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_peak_of_a_gpu_is_counted_anew() -> None:
    kept = torch.ones(MB, device="cuda")
    for size in (100 * MB, 10 * MB):
        use = MemoryUse()
        ballast = torch.ones(size, device="cuda")
        del ballast
        assert use.gpu_peak == pytest.approx(4 * size, rel=0.01)
    assert len(kept) == MB
