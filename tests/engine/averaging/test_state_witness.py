"""What peers tell of their states, and which of these are of one swarm."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from hivemind.utils import MSGPackSerializer

from hivenb.engine.averaging.state_download import (
    MOST_EPOCHS_APART,
    TOLERANCE,
    Question,
    Statement,
    make_statement,
    places_in,
    verdict,
)

STATE = [torch.randn(64, 32), torch.zeros(64), torch.randn(3, 3, dtype=torch.float64), torch.tensor(2.0)]


def ask(count: int = len(STATE)) -> Question:
    return Question.parse(Question(os.urandom(16), count).pack())


def contradicts(ours: list[torch.Tensor], theirs: list[torch.Tensor], apart: int = 0) -> bool | None:
    question = ask()
    own, other = make_statement(question, 7, ours), make_statement(question, 7 + apart, theirs)
    return Statement.parse(own.pack()).contradicts(other)


def test_equal_states_agree_whatever_is_asked() -> None:
    for _ in range(10):
        assert contradicts(STATE, [one.clone() for one in STATE]) is False


@pytest.mark.parametrize("noise", [1e-7, 1e-3, 0.1])
def test_states_that_differ_a_little_agree(noise: float) -> None:
    assert contradicts(STATE, [one + noise * torch.randn_like(one) for one in STATE]) is False


@pytest.mark.parametrize(
    "forged",
    [
        [one * 10 for one in STATE],
        [-one for one in STATE],
        [torch.randn_like(one) for one in STATE],
        [torch.zeros_like(one) for one in STATE],
        [one * 1e30 for one in STATE],
    ],
    ids=["scaled", "of the other sign", "noise", "nothing", "huge"],
)
def test_states_that_are_made_up_do_not(forged: list[torch.Tensor]) -> None:
    assert contradicts(STATE, forged) is True


@pytest.mark.parametrize("apart", range(MOST_EPOCHS_APART + 1))
@pytest.mark.parametrize("size", [0.0, 0.01, 1.0, 20.0])
def test_nor_do_they_if_the_witness_is_some_epochs_further(size: float, apart: int) -> None:
    """The longer tolerance was once more than the distance of any two states."""
    assert contradicts([size * torch.randn_like(one) for one in STATE], STATE, apart) is True
    assert contradicts(STATE, [1.5 * one + 0.3 * torch.randn_like(one) for one in STATE], apart) is False


def test_a_state_that_is_broken_is_no_witness_and_is_contradicted_by_one_that_is_not() -> None:
    broken = [torch.full_like(STATE[0], float("nan")), *STATE[1:]]
    assert contradicts(STATE, broken) is None
    assert contradicts(broken, STATE) is True


def test_a_mask_is_the_same_everywhere() -> None:
    masked, other = (
        [torch.full_like(STATE[0], -torch.inf), *STATE[1:]],
        [torch.full_like(STATE[0], torch.inf), *STATE[1:]],
    )
    assert contradicts(masked, masked) is False
    assert contradicts(masked, other) is True


def test_what_is_too_far_apart_or_of_another_shape_is_not_compared() -> None:
    assert contradicts(STATE, [-one for one in STATE], MOST_EPOCHS_APART + 1) is None
    assert contradicts(STATE, [STATE[0][:8], *STATE[1:]]) is None
    nearly = [one * (1 + 1.5 * TOLERANCE) for one in STATE]
    assert contradicts(nearly, STATE, 0) is False
    assert contradicts([one * (1 + 4 * TOLERANCE) for one in STATE], STATE, 0) is True
    assert contradicts([one * (1 + 4 * TOLERANCE) for one in STATE], STATE, MOST_EPOCHS_APART) is False


def test_only_the_first_tensors_are_asked_for_and_there_have_to_be_so_many() -> None:
    question = ask(1)
    told = make_statement(question, 3, STATE)
    assert told.sizes == (64 * 32,)
    assert set(told.values) <= set(STATE[0].double().flatten().tolist())
    with pytest.raises(ValueError, match="there are 4 tensors, and not 5"):
        make_statement(ask(5), 3, STATE)
    for epoch in (None, -1, 1.0, True, 10**30):
        with pytest.raises(ValueError, match="whole number"):
            make_statement(ask(), epoch, STATE)


def test_types_layouts_and_devices_do_not_matter() -> None:
    other = [one.to(torch.float64) if one.dim() != 2 else one.t().contiguous().t() for one in STATE]
    assert contradicts(STATE, other) is False


@pytest.mark.parametrize(
    "packed",
    [b"", b"\xc1", MSGPackSerializer.dumps(7), MSGPackSerializer.dumps([1, [2], b""]), MSGPackSerializer.dumps([1] * 3)]
    + [MSGPackSerializer.dumps([0, [size], b"x" * 7]) for size in (0, 1, 10**15)],
)
def test_what_is_no_statement_is_a_value_error(packed: bytes) -> None:
    for kind in (Statement, Question):
        with pytest.raises(ValueError):  # noqa: PT011 - msgpack's own say nothing, or anything
            kind.parse(packed)


def test_a_statement_is_small_however_large_the_state_is() -> None:
    assert sum(places_in(10**9, 300) for _ in range(300)) <= 2**16
    assert sum(places_in(10**9, 50_000) for _ in range(50_000)) <= 200_000
    assert len(make_statement(ask(), 1, STATE).values) == sum(places_in(one.numel(), 4) for one in STATE)
    assert np.isfinite(make_statement(ask(), 1, STATE).values).all()


def test_most_decide() -> None:
    assert verdict(0, 0) is True, "there is nobody else"
    assert verdict(1, 1) is True
    assert verdict(0, 1) is None
    assert verdict(0, 2) is False
    assert verdict(2, 1) is True
