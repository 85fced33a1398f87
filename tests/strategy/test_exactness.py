"""What several peers compute is what one process computes on all their samples in one large batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import PacedModel, TinyModel, samples

from strategy.peers import assert_they_met, difference, starting_peers, train_all

pytestmark = [pytest.mark.process, pytest.mark.slow]

EPOCHS = 3

#: What is trained with, by name.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1},
    "momentum": {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    # a decay that shows when it is made once too often, in the first step for instance
    "adamw": {"optimizer": torch.optim.AdamW, "lr": 0.1, "weight_decay": 0.5},
}

#: How peers that train together save memory or do not: their results are the same.
MEMORY: list[dict[str, Any]] = [
    {},
    {"reuse_grad_buffers": True, "offload_optimizer": True},
    {"offload_optimizer": True},
]


class Trained:
    """Peers that have trained with one optimizer after the other, since starting a process takes longest."""

    def __init__(self, names: list[str], *shares: tuple[int, int]):
        self.names, self.shares = names, shares
        with starting_peers() as start:
            self.peers = train_all(start, *(self._stages(number, share) for number, share in enumerate(shares)))

    def _stages(self, number: int, share: tuple[int, int]) -> list[dict[str, Any]]:
        return [
            {
                "share": share,
                "epochs": EPOCHS,
                # of shorter epochs, a peer on a busy machine makes several before it hears of one, and has samples of
                # which it has told nobody, for which it would not count
                "module": PacedModel,
                "target": 480,
                "model": OPTIMIZERS[name],
                "strategy": {"run_id": name, **MEMORY[(number + stage) % len(MEMORY)]},
            }
            for stage, name in enumerate(self.names)
        ]


@pytest.fixture(scope="module")
def two() -> Trained:
    return Trained(list(OPTIMIZERS), (0, 5), (5, 16))


@pytest.fixture(scope="module")
def three() -> Trained:
    return Trained(["adamw"], (0, 5), (5, 6), (6, 16))


@pytest.mark.parametrize(("count", "name"), [*(("two", name) for name in OPTIMIZERS), ("three", "adamw")])
def test_peers_compute_what_one_computes_on_their_batches_together(
    request: pytest.FixtureRequest, count: str, name: str
) -> None:
    """Each goes over its own share of a fixed batch, as often as it gets to; samples count alike, wherever they are."""
    trained: Trained = request.getfixturevalue(count)
    stage = trained.names.index(name)
    assert_they_met(trained.peers, stage)
    reference = TinyModel(**OPTIMIZERS[name])
    optimizer = reference.configure_optimizers()
    x, y = samples(16)
    for epoch in range(EPOCHS):
        optimizer.zero_grad()
        counts = [one.reports(stage)[epoch].samples for one in trained.peers]
        for (start, end), count_of_one in zip(trained.shares, counts, strict=True):
            assert count_of_one % (end - start) == 0
            loss = torch.nn.functional.mse_loss(reference.layer(x[start:end]), y[start:end])
            (loss * count_of_one / sum(counts)).backward()
        optimizer.step()
        expected = [parameter.detach() for parameter in reference.parameters()]
        for one in trained.peers:
            assert difference(one.history(stage)[epoch + 1], expected) < 1e-5
