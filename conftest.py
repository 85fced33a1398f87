"""What holds for notebooks too; all else is in ``tests/conftest.py``, which is not read where only they are run."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cells, which run in a kernel, as tests that start processes."""
    for item in items:
        if not isinstance(item, pytest.Function):
            item.add_marker(pytest.mark.process)
