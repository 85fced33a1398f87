"""Numbers as words: always a unit, few digits."""

from __future__ import annotations

import math

import pytest

from hivenb.run.status import RunState
from hivenb.view import formats, theme


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 s"), (0.42, "0.4 s"), (0.97, "1 s"), (12.4, "12 s"), (59.6, "1 min"), (125, "2 min 5 s"),
     (3600, "1 h"), (11400, "3 h 10 min"), (None, formats.ABSENT), (math.inf, formats.ABSENT)],
)  # fmt: skip
def test_duration(seconds: float | None, text: str) -> None:
    assert formats.duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.0, "0.000"), (0.41234, "0.412"), (2.345, "2.35"), (12.34, "12.3"), (4321.0, "4,321"),
     (0.00012, "1.2e-04"),
     (math.nan, "not a number"), (math.inf, "infinite"), (None, formats.ABSENT)],
)  # fmt: skip
def test_value(number: float | None, text: str) -> None:
    assert formats.value(number) == text


def test_rates_counts_and_ages() -> None:
    assert formats.rate(412.3) == "412 samples/s"
    assert formats.rate(3.14) == "3.1 samples/s"
    assert formats.rate(None) == formats.ABSENT
    assert formats.counted(1, "peer") == "1 peer"
    assert formats.counted(1200, "peer") == "1,200 peers"
    assert formats.ago(1.0) == formats.ago(4.9) == "just now"
    assert formats.ago(17.0) == formats.ago(19.9) == "15 s ago"
    assert formats.ago(130.0) == "2 min ago"


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (999.6, "1.0 kB"), (1234567, "1.2 MB"), (25.4e6, "25 MB"), (3e13, "30 TB"),
     (None, formats.ABSENT), (math.nan, formats.ABSENT)],
)  # fmt: skip
def test_bytes_have_a_unit(number: float | None, text: str) -> None:
    assert formats.size(number) == text


def test_metrics_and_titles() -> None:
    assert formats.metric("val_acc", 0.9123) == "91.2 %"
    assert formats.metric("val_loss", 0.9123) == "0.912"
    assert formats.title("val_acc") == "Validation accuracy"
    assert formats.title("val_f1") == "Validation f1"


@pytest.mark.parametrize("state", list(RunState))
def test_every_state_has_a_word_and_a_colour(state: RunState) -> None:
    assert formats.state(state) in formats.STATES.values()
    assert state.value in theme.STATES


def test_a_share_that_is_not_nothing_is_not_called_so() -> None:
    assert [formats.share(part) for part in (0, 0.009, 0.01, 0.754, 1)] == ["0 %", "< 1 %", "1 %", "75 %", "100 %"]
