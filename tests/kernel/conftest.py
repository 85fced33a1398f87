"""A real kernel for each test of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from real_kernel import Kernel


@pytest.fixture
def kernel(tmp_path) -> Iterator[Kernel]:
    """A kernel of one test's own."""
    started = Kernel(tmp_path)
    try:
        yield started
    finally:
        started.close()
