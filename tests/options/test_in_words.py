"""Values of options in words, as marks on the charts have them: never one of Python's."""

from __future__ import annotations

from typing import Any

import pytest

from hivenb.options import FIELDS, Options
from hivenb.options.choices import PowerSGD
from hivenb.options.in_words import value_in_words


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("delay_grad_averaging", True, "on"),
        ("delay_grad_averaging", False, "off"),
        ("delay_optimizer_step", None, "off"),
        ("offload_optimizer", None, "off"),
        ("matchmaking_time", 10.0, "10 seconds"),
        ("matchmaking_time", 2.5, "2.5 seconds"),
        ("next_chunk_timeout", None, "as matchmaking time"),
        ("allreduce_timeout", None, "as averaging timeout"),
        ("target_batch_size", 4096, "4,096"),
        ("keep_state_every", None, "none"),
        ("performance_ema_alpha", 0.1, "0.1"),
        ("grad_compression", "float16", "float16"),
        ("robust_aggregation", "norm_bound", "norm_bound"),
        ("grad_averager_factory", None, "all-reduce"),
        ("grad_averager_factory", PowerSGD(4).factory(), "PowerSGD, rank 4"),
        ("outer_optimizer", None, "none"),
    ],
)
def test_a_value_in_words(name: str, value: Any, words: str) -> None:
    assert value_in_words(name, value) == words


def test_no_default_is_said_as_python_writes_it() -> None:
    defaults = Options(target_batch_size=64)
    said = {name: value_in_words(name, getattr(defaults, name)) for name in FIELDS}
    assert not {name: words for name, words in said.items() if words in ("None", "True", "False", "", "()")}


def test_what_is_on_as_needed_is_said_as_it_resolves() -> None:
    needed = Options(target_batch_size=64).with_prerequisites(delay_optimizer_step=True)
    assert value_in_words("offload_optimizer", needed.offload_optimizer) == "on"
    without = needed.with_prerequisites(delay_state_averaging=False)
    assert without.delay_optimizer_step is None
    assert value_in_words("delay_optimizer_step", without.delay_optimizer_step) == "off"
