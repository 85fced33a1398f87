"""From where a run goes on, as its files say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hivenb.run.checkpoints import RunFolder

PLAIN: dict[str, Any] = {"state": {}, "param_groups": []}


@pytest.mark.parametrize(
    ("optimizer", "schedulers", "epoch"),
    [
        ({**PLAIN, "hivemind": {"local_epoch": 7}}, [{"last_epoch": 3}], 7),
        (PLAIN, [{"last_epoch": 3}, {"last_epoch": 4}], 4),
        (PLAIN, [{"last_epoch": 0}], 1),
        (PLAIN, [], 1),
    ],
    ids=["of the swarm", "plain", "plain, not moved yet", "plain, without schedulers"],
)
def test_a_run_goes_on_at_the_epoch_at_which_its_strategy_does(
    tmp_path: Path, optimizer: Any, schedulers: list[Any], epoch: int
) -> None:
    path = tmp_path / "saved.ckpt"
    torch.save({"optimizer_states": [optimizer], "lr_schedulers": schedulers}, path)
    assert RunFolder().begin_at(path, 0, False) == epoch
