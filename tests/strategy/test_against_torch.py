"""Twelve optimizers and eight schedulers do in a swarm what they do without, also in host memory and a step late.

A peer that is alone, with what makes up for that, is not late.
"""

from __future__ import annotations

import pytest
import torch

import hivenb
from strategy.against_torch import CASES, MODES, OPTIMIZERS, SCHEDULERS, by_torch, difference, in_a_swarm, untrained

#: Of sums in another order; the parameters are about 1.
TOLERANCE = 1e-5


def test_there_are_as_many_as_the_table_says() -> None:
    assert len(SCHEDULERS) == 8
    assert len(OPTIMIZERS) == 12 or not hasattr(torch.optim, "Adafactor")


#: Optimizers without a scheduler, at once and in host memory, test_optimizers.py compares with plain Lightning.
TRAINED = [(name, mode) for name in CASES for mode in MODES if name in SCHEDULERS or mode in ("delayed", "compensated")]


@pytest.mark.parametrize(("name", "mode"), TRAINED)
def test_the_parameters_and_rates_are_those_of_plain_torch(swarm: hivenb.Swarm, name: str, mode: str) -> None:
    case = CASES[name]
    reference, trained = by_torch(case, mode), in_a_swarm(case, mode, swarm)
    assert difference(trained, reference) < TOLERANCE
    assert trained.settings == reference.settings
    start = untrained(case)
    assert all(not torch.equal(one, other) for one, other in zip(trained.parameters, start.parameters, strict=True))


def test_a_step_late_is_another_training() -> None:
    """So that the modes are not compared with the same."""
    case = CASES["SGD"]
    assert difference(by_torch(case, "delayed"), by_torch(case, "synchronous")) > 0.01
