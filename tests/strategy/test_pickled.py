"""A callback that knows its Trainer can be pickled with it, as with Lightning's strategies; a DHT stays where it is."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from lightning import Callback
from tiny import LOOPBACK, MODES, TinyModel, loader, own_run, parameters, trainer

import hivenb
from hivenb.errors import SwarmError
from hivenb.strategy import HivemindStrategy

pytestmark = pytest.mark.process

SECRET = "known to few, and 32 characters long at least"


class Knows(Callback):
    """Its Trainer, and what becomes of it in a pickle while that trains."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.trainer = trainer
        self.within = pickle.loads(pickle.dumps(trainer)).global_step


@pytest.mark.parametrize("mode", MODES)
def test_a_callback_that_knows_its_trainer_is_pickled_with_it(swarm: hivenb.Swarm, mode: str) -> None:
    knows, model = Knows(), TinyModel(torch.optim.AdamW)
    chosen = HivemindStrategy(16, dht=swarm.dht, **own_run(), **MODES[mode])
    trainer(chosen, max_epochs=1, callbacks=[knows]).fit(model, loader())
    assert knows.within == 8
    other = pickle.loads(pickle.dumps(knows)).trainer
    assert (other.global_step, other.strategy.options) == (8, chosen.options)
    for mine, theirs in zip(parameters(model), parameters(other.lightning_module), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    (seen,) = knows.trainer.validate(model, loader(), verbose=False)
    assert other.validate(other.lightning_module, loader(), verbose=False) == [seen]
    with pytest.raises(SwarmError, match="comes out of a pickle"):
        other.fit(other.lightning_module, loader())


def test_no_secret_is_in_a_pickle() -> None:
    chosen = HivemindStrategy(16, secret=SECRET, **LOOPBACK)
    made = trainer(chosen, max_epochs=1)
    made.fit(TinyModel(), loader())
    assert SECRET.encode() not in pickle.dumps(made)
