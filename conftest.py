"""For notebooks, too, whose folder has no tests: a cell that is interrupted because it takes too long has failed."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

# A run shows what earlier ones of its name have left, and tests and notebooks begin with nothing; kernels inherit it.
os.environ["HIVENB_HISTORY"] = "off"

#: Seconds after a cell's own time limit in which its kernel takes the interrupt, and is shut down.
ENDING = 60

#: Notebooks that measure memory, of which a server that is a copy takes less.
OWN_SERVER = frozenset({"03_memory.ipynb"})


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Gives a notebook's cell the time that it may take, as the limit for tests is shorter."""
    for item in items:
        if not isinstance(item, pytest.Function):
            item.add_marker(pytest.mark.timeout(int(config.getoption("nbval_cell_timeout")) + ENDING))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Lets a notebook's local peers be forked from a copy of its kernel, as on Binder: a server imports all once more.

    Those of tests/kernel and tests/peers are forked from a server of their own.
    """
    if isinstance(item, pytest.Function) or item.path.name in OWN_SERVER:
        return (yield)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HIVENB_PEERS_SHARE_MEMORY", "1")  # before the first cell's setup starts the kernel
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fails a notebook's cell at its time limit; nbval lets it pass if it takes the interrupt as hivenb's cells do."""
    was_late = getattr(item.parent, "timed_out", False)
    result = yield
    if getattr(item.parent, "timed_out", False) and not was_late:
        pytest.fail("the cell took longer than --nbval-cell-timeout, and was interrupted", pytrace=False)
    return result
