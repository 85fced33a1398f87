"""The cells of a training, run again and again in one kernel; see test_cells.py for a few of them."""

from __future__ import annotations

from typing import Any

import pytest
from cycles import FEW_DESCRIPTORS, grown

pytestmark = [pytest.mark.slow]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_fifty_cycles_cost_nothing(kernel: Any) -> None:
    descriptors, threads, size = grown(kernel, warm_up=15, cycles=50)
    assert descriptors <= FEW_DESCRIPTORS / 10
    assert threads == 0
    assert size <= 1e6
