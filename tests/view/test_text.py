"""A run as text."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from hivenb.history import History
from hivenb.view.empty_states import Situation, no_peers_listed
from hivenb.view.text import bar, status_line, summary, table


@pytest.mark.parametrize(
    ("share", "drawn"), [(0, "[----]"), (0.5, "[##--]"), (1, "[####]"), (7, "[####]"), (-1, "[----]")]
)
def test_bar(share: float, drawn: str) -> None:
    assert bar(share, 4) == drawn


def test_a_run_in_one_line(status: Any) -> None:
    assert status_line(status, bar_width=10) == (
        "ready to start  swarm epoch 14  [######----] 1,310 / 2,048 samples, 3 s left  3 peers  "
        "412 samples/s  loss 0.412"
    )


def test_unknown_figures_are_left_out(status: Any) -> None:
    line = status_line(replace(status, loss=None, eta_seconds=None, num_peers=1))
    assert "loss" not in line
    assert "left" not in line
    assert "  1 peer  " in line


def test_an_error_that_others_have_written_steers_no_terminal(status: Any) -> None:
    text = summary(replace(status, error="P2PHandlerError: \x1b[2J\u202eerror\nand more"), History().snapshot())
    assert text.splitlines()[1:3] == [r"failed: P2PHandlerError: \x1b[2J\u202eerror", "and more"]


def test_summary_is_the_same_for_the_same_facts(status: Any, members: Any) -> None:
    history = History()
    for value in (2.5, 0.5, 0.75):
        history.record("loss", value, time=0.0)
        history.record("val_acc", value / 3, time=0.0)
    text = summary(replace(status, error="the network is gone"), history.snapshot(), members)
    assert text == summary(replace(status, error="the network is gone"), history.snapshot(), members)
    assert text.splitlines()[1:] == [
        "failed: the network is gone",
        "",
        "                      first    last    best",
        "Training loss          2.50   0.750   0.500",
        "Validation accuracy  83.3 %  25.0 %  83.3 %",
        "",
        "peer                         epoch          speed  samples  share        last seen",
        "…lf0001 (this one)              14  130 samples/s    5,000   25 %         just now",
        "Ann …her002 (only outwards)     14  282 samples/s   15,000   75 %  gone (15 s ago)",
    ]


def test_batches_that_were_skipped_are_said(status: Any) -> None:
    assert "left out" not in summary(status, History().snapshot())
    for number, words in ((1, "1 batch skipped"), (3, "3 batches skipped")):
        assert words in summary(replace(status, skipped_batches=number), History().snapshot())


def test_the_best_is_that_of_the_points_without_gaps(status: Any) -> None:
    history = History()
    for value in (2.0, math.nan, 1.0):
        history.record("loss", value)
    assert summary(status, history.snapshot()).splitlines()[3].split()[2:] == ["2.00", "1.00", "1.00"]


def test_says_how_to_get_peers(status: Any) -> None:
    assert summary(status, History().snapshot()).splitlines()[-1] == no_peers_listed(Situation(status.state.value))


def test_lines_of_a_table_end_without_spaces() -> None:
    lines = table(("a", ""), [("1", ""), ("22", "x")], numbers_from=1)
    assert lines == ["a", "1", "22  x"]
