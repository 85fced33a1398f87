"""For notebooks, too, whose folder has no tests: a cell that is interrupted because it takes too long has failed."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest

# A run shows what earlier ones of its name have left, and tests and notebooks begin with nothing; kernels inherit it.
os.environ["HIVENB_HISTORY"] = "off"

#: Seconds after a cell's own time limit in which its kernel takes the interrupt, and is shut down.
ENDING = 60

#: Notebooks that measure memory, of which a server that is a copy takes less.
OWN_SERVER = frozenset({"03_memory.ipynb"})

#: What notebooks train less, wait less, or do at more leisure, when they are tested, by what they have in its place:
#: they come to the same answers. ``python tests/save_notebook.py`` runs them as they are.
SHORTER = {
    "04_compression.ipynb": {"epochs=10, local_peers=1": "epochs=5, local_peers=1"},
    "05_live.ipynb": {"model = Noting()": "model = Noting(width=32, layers=1)"},
    "06_less_traffic.ipynb": {"samples = 20_480": "samples = 10_240"},
    "07_across_the_internet.ipynb": {
        "hours=40 / 3600": "hours=25 / 3600",
        "time.time() + 40": "time.time() + 25",
        "tasks.digits(hidden=16": "tasks.digits(hidden=8, blocks=1",
        "time.sleep(0.05)": "time.sleep(0.08)",
    },
    "08_your_own_model.ipynb": {
        # else the notebook's run takes all cores while the programs that are to join it import what they need
        "    def training_step(self, batch, batch_idx):\n        images": (
            "    def training_step(self, batch, batch_idx):\n        __import__('time').sleep(0.03)\n        images"
        ),
        "  max_epochs: 4\n": "  max_epochs: 2\n",
        "    run.wait(epochs=25, timeout=300)": "    run.wait(epochs=15, timeout=300)",
    },
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Gives a notebook's cell the time that it may take, as the limit for tests is shorter, and what it does less."""
    for item in items:
        if not isinstance(item, pytest.Function):
            _shorten(item)
            item.add_marker(pytest.mark.timeout(int(config.getoption("nbval_cell_timeout")) + ENDING))


def _shorten(cell: Any) -> None:
    for whole, shorter in SHORTER.get(cell.path.name, {}).items():
        # those that were collected before are shorter already
        if not any(text in one.source for one in cell.parent.nb.cells for text in (whole, shorter)):
            raise pytest.UsageError(f"{cell.path.name} has no {whole!r} any more: see SHORTER in conftest.py")
        cell.cell.source = cell.cell.source.replace(whole, shorter)


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
