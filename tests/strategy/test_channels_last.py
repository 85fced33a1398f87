"""Weights that lie in memory channel by channel are averaged as others are, and lie there as they did afterwards."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tiny import DELAYS, samples

from strategy.conv_model import ConvModel
from strategy.peers import Start, assert_they_met, difference, starting_peers, train_all

pytestmark = [pytest.mark.process, pytest.mark.slow]

EPOCHS = 3
SHARES = ((0, 5), (5, 16))

#: How the peers are set up, and which of them have the layout; their results are the same.
CASES: dict[str, tuple[dict[str, Any], tuple[bool, bool]]] = {
    "synchronous": ({}, (True, True)),
    "beside a contiguous peer": ({}, (True, False)),
    "offloaded": ({"offload_optimizer": True}, (True, True)),
    "offloaded, beside a contiguous peer": ({"offload_optimizer": True}, (False, True)),
    "reused gradient buffers": ({"reuse_grad_buffers": True}, (True, False)),
    "moments, too": ({"average_opt_statistics": ("exp_avg", "exp_avg_sq")}, (True, False)),
}

#: Optimizers go over memory as it lies there if they are fused.
MODEL: dict[str, Any] = {"optimizer": partial(torch.optim.AdamW, fused=True), "lr": 0.1, "weight_decay": 0.5}


def stages_of(number: int, cases: dict[str, Any], target: int = 480, **model: Any) -> list[dict[str, Any]]:
    return [
        {
            "share": SHARES[number],
            "epochs": EPOCHS,
            "target": target,
            "module": ConvModel,
            "model": {**MODEL, "channels_last": layouts[number], **model},
            "strategy": {"run_id": name.replace(" ", "-").replace(",", ""), **settings},
        }
        for name, (settings, layouts) in cases.items()
    ]


@pytest.fixture(scope="module")
def trained() -> Any:
    with starting_peers() as start:
        yield train_all(start, *(stages_of(number, CASES) for number in range(2)))


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_peers_compute_what_one_computes_with_contiguous_weights(trained: Any, case: str) -> None:
    stage = list(CASES).index(case)
    assert_they_met(trained, stage)
    reference = ConvModel(**MODEL)
    optimizer = reference.configure_optimizers()
    x, y = samples(16)
    for epoch in range(EPOCHS):
        optimizer.zero_grad()
        counts = [one.reports(stage)[epoch].samples for one in trained]
        for (start, end), count_of_one in zip(SHARES, counts, strict=True):
            loss = torch.nn.functional.mse_loss(reference.layer(x[start:end]), y[start:end])
            (loss * count_of_one / sum(counts)).backward()
        optimizer.step()
        expected = [parameter.detach() for parameter in reference.parameters()]
        for one in trained:
            assert difference(one.history(stage)[epoch + 1], expected) < 1e-5


#: With these, results come later.
BACKGROUND: dict[str, tuple[dict[str, Any], tuple[bool, bool]]] = {"all delays": (DELAYS, (True, False))}

#: In each of these, one peer has the layout and the other has not.
MIXED = {**{name: CASES[name] for name in ("beside a contiguous peer", "reused gradient buffers")}, **BACKGROUND}


def test_parameters_that_differ_are_averaged(start_peer: Start) -> None:
    """Gradients alone would leave them as far from each other as they were."""
    slow = {"optimizer": torch.optim.SGD, "lr": 0.01, "weight_decay": 0.0}
    two = train_all(start_peer, *(stages_of(number, MIXED, seed=number, **slow) for number in range(2)))
    for stage, name in enumerate(MIXED):
        at_first = difference(*(ConvModel(seed=number).state_dict().values() for number in range(2)))
        common = sorted(set(two[0].history(stage)) & set(two[1].history(stage)))
        in_the_end = difference(*(one.history(stage)[common[-1]] for one in two))
        assert at_first > 0.5
        assert in_the_end < (0.1 if name in BACKGROUND else 1e-6), name
        if name not in BACKGROUND:
            assert_they_met(two, stage)
