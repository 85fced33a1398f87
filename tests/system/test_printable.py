"""Texts of others steer neither a terminal nor a reader."""

from __future__ import annotations

import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hivenb.system.safe_text import printable


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("\x1b[2J\x1b[31mred", r"\x1b[2J\x1b[31mred"),
        ("over\rwritten", r"over\rwritten"),
        ("\x9b31m", r"\x9b31m"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("\u2066isolated\u2069", r"\u2066isolated\u2069"),
        ("zero\u200bwidth\ufeff", r"zero\u200bwidth\ufeff"),
        ("\ud800", r"\ud800"),
        ("Zoë 👩\u200d🔬 x\u200cy", "Zoë 👩\u200d🔬 x\u200cy"),
    ],
)
def test_what_cannot_be_seen_is_written_out(written: str, shown: str) -> None:
    assert printable(written) == shown


def test_no_character_that_steers_is_left_out() -> None:
    kept = "\n\t\u200c\u200d\xad"
    directions = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    for code in range(sys.maxunicode + 1):
        one = chr(code)
        if unicodedata.category(one) in ("Cc", "Cs", "Zl", "Zp") or unicodedata.bidirectional(one) in directions:
            assert one in kept or printable(one) != one, f"U+{code:04X}"


@given(st.text())
def test_it_can_always_be_written(text: str) -> None:
    shown = printable(text)
    assert printable(shown) == shown
    shown.encode()
