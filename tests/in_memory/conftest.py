"""Tests that are coroutines, each in a swarm and a loop of its own."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest

from in_memory.swarm import InMemorySwarm, opened


@pytest.fixture
def memory() -> Iterator[InMemorySwarm]:
    """A swarm in memory, with nobody in it yet."""
    with opened() as swarm:
        yield swarm


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test in the loop of its swarm."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    arguments["memory"].loop.run_until_complete(pyfuncitem.obj(**arguments))
    return True
