"""What a DHT's process is asked for with what was defined after its start, or that it cannot read."""

from __future__ import annotations

import operator
import sys
from functools import partial
from typing import Any

import pytest
from hivemind.utils import MPFuture, get_dht_time

from hivenb.engine.network.dht import DHT
from hivenb.errors import SwarmError

pytestmark = pytest.mark.timeout(120)

#: Seconds for an answer.
PATIENCE = 30.0

A_CELL = """
from hivemind.dht.validation import RecordValidatorBase

class Picky(RecordValidatorBase):
    def validate(self, record):
        return b"bad" not in record.value
    def sign_value(self, record):
        return record.value
    def strip_value(self, record):
        return record.value
    def merge_with(self, other):
        return False
    @property
    def priority(self):
        return 0

async def who_is_it(dht, node):
    return str(node.peer_id)
"""


@pytest.fixture
def cell(dht: DHT, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a cell of a notebook has defined after the DHT was started."""
    assert dht.is_alive()
    main = sys.modules["__main__"]
    defined: dict[str, Any] = {"__name__": "__main__"}
    exec(A_CELL, defined)
    for name in ("Picky", "who_is_it"):
        monkeypatch.setattr(main, name, defined[name], raising=False)
    return defined


def test_a_function_of_a_cell_runs_in_its_process(dht: DHT, cell: dict[str, Any]) -> None:
    assert dht.run_coroutine(cell["who_is_it"], return_future=True).result(PATIENCE) == str(dht.peer_id)


def test_a_validator_of_a_cell_looks_at_records(dht: DHT, cell: dict[str, Any]) -> None:
    dht.add_validators([cell["Picky"]()])
    good, bad = (
        dht.store("key", value, get_dht_time() + 60, return_future=True).result(PATIENCE) for value in ("good", "bad")
    )
    assert (good, bad) == (True, False)


class Unreadable:
    """Nobody can unpack it."""

    def __reduce__(self) -> Any:
        return operator.truediv, (1, 0)


def test_who_asks_for_what_cannot_be_unpacked_is_told(dht: DHT) -> None:
    answer = dht.store("key", Unreadable(), get_dht_time() + 60, return_future=True)
    with pytest.raises(SwarmError, match="could not unpack what it was asked for: ZeroDivisionError: division by zero"):
        answer.result(PATIENCE)
    assert dht.store("key", 1, get_dht_time() + 60, return_future=True).result(PATIENCE), "and it works as before"


async def _answer(dht: Any, node: Any, to: MPFuture[str]) -> None:
    to.set_result("here")


def test_what_processes_share_is_handed_over(dht: DHT) -> None:
    told: MPFuture[str] = MPFuture()
    dht.run_coroutine(partial(_answer, to=told), return_future=True).result(PATIENCE)
    assert told.result(PATIENCE) == "here"
