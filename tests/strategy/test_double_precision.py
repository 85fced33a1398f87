"""Training in double precision: what peers average is in double precision from end to end."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager
from lightning import Trainer
from tiny import DELAYS, QUIET, PacedModel, TinyModel, loader, own_run, parameters, samples, trainer

import hivenb
from hivenb.errors import SwarmError
from hivenb.strategy import HivemindStrategy
from strategy.peer import WideModel
from strategy.peers import Start, assert_they_met, difference, train_all

EPOCHS = 2
SHARES = ((0, 5), (5, 16))

MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "offloaded": {"offload_optimizer": True},
    "reused gradient buffers": {"reuse_grad_buffers": True},
    "averaging in background": {"delay_state_averaging": True},
    "all delays": DELAYS,
}

#: An error of single precision is larger.
EXACT = 1e-12


def strategy(swarm: hivenb.Swarm, target: int, **kwargs: Any) -> HivemindStrategy:
    settings = {"matchmaking_time": 2.0, "averaging_timeout": 20.0, **own_run(), **kwargs}
    return HivemindStrategy(target, dht=swarm.dht, **settings)


@pytest.mark.parametrize("mode", MODES)
def test_one_peer_trains_as_plain_lightning_does(swarm: hivenb.Swarm, mode: str) -> None:
    model, plain = TinyModel(lr=0.1), TinyModel(lr=0.1)
    chosen = strategy(swarm, 16, **MODES[mode])
    trainer(chosen, max_epochs=4, precision="64-true").fit(model, loader(64, 8))
    assert chosen.hivemind_epoch == 16
    Trainer(**QUIET, max_epochs=4, precision="64-true").fit(plain, loader(64, 16))
    for one, other in zip(parameters(model), parameters(plain), strict=True):
        assert one.dtype == other.dtype == torch.float64
        if mode != "all delays":  # its steps lag behind
            torch.testing.assert_close(one, other, rtol=0.0, atol=EXACT)


def stage(number: int, name: str, **settings: Any) -> dict[str, Any]:
    return {
        "share": SHARES[number],
        "epochs": EPOCHS,
        # of shorter epochs, a peer on a busy machine makes several before it hears of one, and has samples of which it
        # has told nobody, for which it would not count
        "module": PacedModel,
        "target": 480,
        "model": {"optimizer": torch.optim.AdamW, "lr": 0.1, "weight_decay": 0.5},
        "trainer": {"precision": "64-true"},
        **settings,
        "strategy": {"run_id": name.replace(" ", "-"), **settings.get("strategy", {})},
    }


@pytest.mark.process
@pytest.mark.slow
def test_peers_average_in_double_precision(start_peer: Start) -> None:
    others = {name: mode for name, mode in MODES.items() if name != "synchronous"}  # as "moments" is, too
    modes = {**others, "moments": {"average_opt_statistics": ("exp_avg", "exp_avg_sq")}}
    two = train_all(
        start_peer, *([stage(number, name, strategy=mode) for name, mode in modes.items()] for number in range(2))
    )
    x, y = (values.double() for values in samples(16))
    for index, name in enumerate(modes):
        if name == "all delays":
            assert all(one.reports(index) for one in two)  # on a busy machine, a round may be missed
            continue
        assert_they_met(two, index)
        reference = TinyModel(optimizer=torch.optim.AdamW, lr=0.1, weight_decay=0.5).double()
        optimizer = reference.configure_optimizers()
        for epoch in range(EPOCHS):
            optimizer.zero_grad()
            counts = [one.reports(index)[epoch].samples for one in two]
            for (start, end), count in zip(SHARES, counts, strict=True):
                loss = torch.nn.functional.mse_loss(reference.layer(x[start:end]), y[start:end])
                (loss * count / sum(counts)).backward()
            optimizer.step()
            for one in two:
                moment = one.history(index)[epoch + 1]
                assert all(parameter.dtype == torch.float64 for parameter in moment)
                assert difference(moment, [parameter.detach() for parameter in reference.parameters()]) < EXACT, name


@pytest.mark.process
@pytest.mark.long
def test_low_rank_gradients_go_with_every_precision(start_peer: Start) -> None:
    """Their factors are in single precision."""
    low_rank = {"grad_averager_factory": partial(PowerSGDGradientAverager, averager_rank=2)}
    precisions = ("64-true", "bf16-true")
    two = train_all(
        start_peer,
        *(
            [
                stage(number, one, module=WideModel, model={}, trainer={"precision": one}, strategy=low_rank)
                for one in precisions
            ]
            for number in range(2)
        ),
    )
    for index in range(len(precisions)):
        assert_they_met(two, index)


@pytest.mark.process
def test_a_peer_in_another_precision_is_refused(eventually: Any) -> None:
    with hivenb.Swarm("double") as one, hivenb.Swarm("single", initial_peers=one.invite) as other:
        options = hivenb.Options(target_batch_size=64, matchmaking_time=1.0, run_id="both")
        double = hivenb.TrainingRun(
            TinyModel(), loader(), swarm=one, options=options, accelerator="cpu", precision="64-true"
        )
        # before the other trains: Lightning makes float64 the type of all new tensors of the process meanwhile
        single = hivenb.TrainingRun(TinyModel(), loader(), swarm=other, options=options, accelerator="cpu")
        double.start()
        eventually(lambda: other.peers("both"), 60)
        single.start()
        with pytest.raises(SwarmError, match=r"layer\.weight, is averaged in float32 here and in float64 in the swarm"):
            single.wait(timeout=30)
        assert double.wait(epochs=2, timeout=60)
        double.stop()
