"""How many operators a batch in the middle of an epoch takes beyond Lightning's: on a GPU, Python sets the pace."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from lightning import Callback, LightningModule, Trainer
from tiny import DELAYS, QUIET, TinyModel, loader, own_run, trainer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hivenb
from hivenb.engine.optimizer import skipped_batches
from hivenb.strategy import HivemindStrategy

MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "offloaded": {"offload_optimizer": True},
    "all delays": DELAYS,
    "reused gradient buffers": {"reuse_grad_buffers": True},
}

#: The batch that is looked at, long after the start and long before the end of the epoch.
LOOKED_AT = 5
#: Operators on top, each of which may be one for all parameters together. One for each of them would be dozens.
MOST_ON_TOP = 16
#: What only looks at memory otherwise, and gives the device nothing to do.
VIEWS = {"aten.detach.default", "aten.view.dtype"}


class Operators(TorchDispatchMode):
    """Counts what is computed in its thread."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(function) not in VIEWS:
            self.count[str(function)] += 1
        return function(*args, **(kwargs or {}))


class LooksAtABatch(Callback):
    """Counts the operators from the end of the batch before the one that is looked at to its end."""

    def __init__(self) -> None:
        self.operators = Operators()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        batch: int = args[-1]
        if batch == LOOKED_AT - 1:
            self.operators.__enter__()
        elif batch == LOOKED_AT:
            self.operators.__exit__(None, None, None)


class DeepModel(TinyModel):
    """Many layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(self.layer, *(nn.Linear(2, 2) for _ in range(20)))  # type: ignore[assignment]


def operators(chosen: Trainer) -> Counter[str]:
    looks = LooksAtABatch()
    chosen.callbacks.append(looks)
    chosen.fit(DeepModel(), loader(64, 8))
    return looks.operators.count


@pytest.mark.parametrize("is_judged_late", [False, True], ids=["as on a CPU", "as on a GPU"])
@pytest.mark.parametrize("mode", MODES)
def test_a_batch_takes_few_operators_more_than_one_of_lightning(
    swarm: hivenb.Swarm, monkeypatch: pytest.MonkeyPatch, mode: str, is_judged_late: bool
) -> None:
    monkeypatch.setattr(skipped_batches, "can_be_judged_late", lambda gradients: is_judged_late)
    strategy = HivemindStrategy(10_000, dht=swarm.dht, **own_run(), **MODES[mode])
    ours = operators(trainer(strategy, max_epochs=1))
    # without a step of the optimizer in that batch, either
    plain = operators(Trainer(**{**QUIET, "max_epochs": 1, "accumulate_grad_batches": 1000}))
    on_top = sum((ours - plain).values())
    assert sum(plain.values()) > 100  # each operator of each layer is seen
    assert 0 < on_top <= MOST_ON_TOP, ours - plain
