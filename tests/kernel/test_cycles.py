"""The cells of a training, run again and again in one kernel: nothing of the last time is left but its picture."""

from __future__ import annotations

from typing import Any

import pytest
from cycles import run_cycles

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

#: Of a cycle, on the average of a few. One that is kept takes 13 descriptors, 2 threads and 50 MB; what hivemind shares
#: between processes comes and goes by a few descriptors, and the kernel's heap grows in the first dozen cycles.
FEW_DESCRIPTORS, FEW_BYTES = 2, 30e6


def grown(kernel: Any, warm_up: int, cycles: int) -> tuple[float, float, float]:
    """Descriptors, threads and bytes that a cycle leaves behind, on the average."""
    seen = run_cycles(kernel, 1 + warm_up + cycles)
    print(*seen, sep="\n")
    before, after = seen[warm_up], seen[-1]
    return (
        (after.descriptors - before.descriptors) / cycles,
        (after.threads - before.threads) / cycles,
        (after.memory - before.memory) / cycles,
    )


def test_a_few_cycles_leave_nothing_behind(kernel: Any) -> None:
    descriptors, threads, size = grown(kernel, warm_up=2, cycles=4)
    assert descriptors <= FEW_DESCRIPTORS
    assert threads == 0
    assert size <= FEW_BYTES


@pytest.mark.long
@pytest.mark.timeout(900)
def test_fifty_cycles_cost_nothing(kernel: Any) -> None:
    descriptors, threads, size = grown(kernel, warm_up=15, cycles=50)
    assert descriptors <= FEW_DESCRIPTORS / 10
    assert threads == 0
    assert size <= 1e6
