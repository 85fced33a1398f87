"""What a peer shares with its averagers is known before they are made."""

from __future__ import annotations

from types import SimpleNamespace

import lightning
import pytest
import tiny
import torch

from hivenb.errors import PlatformError
from hivenb.options import Options
from hivenb.strategy import HivemindStrategy
from hivenb.strategy.checks import shared_bytes
from hivenb.system import environment


def test_parameters_and_gradients_are_shared_in_single_precision_at_least() -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(100, 10, bias=False).parameters(), lr=0.1)
    options = Options(target_batch_size=8)
    assert shared_bytes(optimizer, options) == 2 * 4000
    assert shared_bytes(optimizer, options.replace(use_local_updates=True)) == 4000
    for dtype, size in ((torch.bfloat16, 4), (torch.float64, 8)):
        optimizer = torch.optim.SGD(torch.nn.Linear(100, 10, bias=False, dtype=dtype).parameters(), lr=0.1)
        assert shared_bytes(optimizer, options) == 2 * 1000 * size


@pytest.mark.process
def test_a_peer_says_so_before_it_starts_anything(swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    room = SimpleNamespace(f_frsize=1, f_blocks=64, f_bavail=16)
    monkeypatch.setattr(environment.os, "statvfs", lambda folder: room)
    trainer: lightning.Trainer = tiny.trainer(HivemindStrategy(32, dht=swarm.dht, **tiny.own_run()), max_epochs=1)
    with pytest.raises(PlatformError, match="/dev/shm has"):
        trainer.fit(tiny.TinyModel(), tiny.loader())
