"""A comparison in a cell: seen while it works, and kept as far as it came when the cell is interrupted."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from real_kernel import PATIENCE, Kernel

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(240)]

COMPARE = """
import hivenb, tiny
options = hivenb.Options(target_batch_size=256, matchmaking_time=2.0)
data = (tiny.loader(256, 8, shuffle=True), tiny.loader(64, 8, seed=1))
both = {"first": options, "second": options.replace(grad_compression="float16")}
comparison = hivenb.compare(both, tiny.PacedModel(), data, epochs=8, local_peers=1, accelerator="cpu")
comparison
"""


def pictures_until(kernel: Kernel, cell: str, words: str) -> list[dict[str, Any]]:
    """What the cell shows, again and again in the same place, until it shows such words."""
    shown: list[dict[str, Any]] = []
    end = time.monotonic() + PATIENCE
    while not shown or re.search(words, shown[-1]["data"]["text/plain"]) is None:
        assert time.monotonic() < end, f"{words!r} was not shown"
        message = kernel.client.get_iopub_msg(timeout=PATIENCE)
        assert message["msg_type"] != "error", message["content"]
        if message["msg_type"] in ("display_data", "update_display_data"):
            assert message["parent_header"]["msg_id"] == cell
            shown.append(message["content"])
    return shown


@pytest.mark.long
def test_it_is_seen_while_it_works_and_an_interrupt_keeps_what_is_finished(kernel: Kernel) -> None:
    cell = kernel.begin(COMPARE)
    began = time.monotonic()
    first = pictures_until(kernel, cell, "opens a swarm")
    assert len(first) == 1, "at once, not when everything is over"
    shown = first + pictures_until(kernel, cell, r"epoch [1-9] of 8")
    text = shown[-1]["data"]["text/plain"]
    assert "waits for its turn" in text
    assert "0 of 2 trainings finished" in text
    assert "<img alt=" in shown[-1]["data"]["text/html"], "curves as well"
    shown += pictures_until(kernel, cell, "1 of 2 trainings finished")
    lasted = time.monotonic() - began
    assert len({one["transient"]["display_id"] for one in shown}) == 1, "in one place"
    assert len(shown) <= 2 * lasted + 5, "at a pace that a browser can follow"

    pictures_until(kernel, cell, r"(epoch|meet|starts)")
    kernel.interrupt()
    assert kernel.finish(cell) == "", "the output is there already; and nothing is raised"
    assert kernel.run("print(repr(comparison))").startswith("Comparison(first, second: interrupted (")
    assert kernel.run("print(comparison['first'].training_loss > 0, len(comparison.outcomes))") == "True 1\n"
    again = kernel.run("comparison")
    assert "interrupted" in again, "another cell shows it again"
    assert kernel.run("print(hivenb.Swarm('comparison: second').close())") == "None\n"
