"""Training with an outer optimizer: what comes of it at one peer, in a swarm, and after a stop."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hivemind.compression import Float16Compression
from lightning import Callback
from tiny import PacedModel, TinyModel, in_large_batches, large_batches, loader, own_run, parameters, samples, trainer

import hivenb
from hivenb.engine.optimizer.handover import release, take_over
from hivenb.options import Options
from hivenb.run.status import RunState
from hivenb.strategy import HivemindStrategy
from hivenb.strategy.kept_state import KeptState
from hivenb.strategy.live_changes import engine_settings
from hivenb.training import TrainingRun

pytestmark = pytest.mark.process

#: Seconds within which anything has to happen that has no bound of its own; the machine may be busy.
PATIENCE = 90.0

NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def strategy(swarm: hivenb.Swarm, target: int = 32, **more: Any) -> HivemindStrategy:
    settings = {"use_local_updates": True, "outer_optimizer": "nesterov", "matchmaking_time": 0.5, **own_run()}
    return HivemindStrategy(target, dht=swarm.dht, **{**settings, "averaging_timeout": 20.0, **more})


def trained_by_hand(model: TinyModel, inner_epochs: int, make_outer: Any = NESTEROV) -> tuple[list[Any], Any]:
    """What DiLoCo's authors write down, with one worker: batches of 8, four to a swarm epoch."""
    anchors = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    outer, inner = make_outer(anchors), model.configure_optimizers()
    x, y = samples(64)
    for start in [at for _ in range(inner_epochs) for at in range(0, 64, 8)]:
        inner.zero_grad()
        torch.nn.functional.mse_loss(model.layer(x[start : start + 8]), y[start : start + 8]).backward()
        inner.step()
        if (start + 8) % 32 == 0:
            for anchor, parameter in zip(anchors, model.parameters(), strict=True):
                anchor.grad = anchor.detach() - parameter.detach()
            outer.step()
            with torch.no_grad():
                for anchor, parameter in zip(anchors, model.parameters(), strict=True):
                    parameter.copy_(anchor)
    return parameters(model), outer


@pytest.mark.parametrize("outer", ["nesterov", partial(torch.optim.Adam, lr=0.01)], ids=["nesterov", "adam"])
@pytest.mark.parametrize("delayed", [False, True], ids=["synchronous", "delayed"])
def test_one_peer_does_what_the_paper_says(swarm: hivenb.Swarm, outer: Any, delayed: bool) -> None:
    model, reference = TinyModel(lr=0.1, momentum=0.9), TinyModel(lr=0.1, momentum=0.9)
    reference.load_state_dict(model.state_dict())
    chosen = strategy(swarm, outer_optimizer=outer, delay_state_averaging=delayed)
    trainer(chosen, max_epochs=3).fit(model, loader(64, 8))
    expected, _ = trained_by_hand(reference, 3, NESTEROV if outer == "nesterov" else outer)
    for got, wanted in zip(parameters(model), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_a_training_that_is_resumed_goes_on_as_if_it_had_not_stopped(swarm: hivenb.Swarm, tmp_path: Path) -> None:
    model, reference = TinyModel(lr=0.1, momentum=0.9), TinyModel(lr=0.1, momentum=0.9)
    reference.load_state_dict(model.state_dict())
    first = trainer(strategy(swarm), max_epochs=2)
    first.fit(model, loader(64, 8))
    first.save_checkpoint(tmp_path / "stopped.ckpt")
    resumed = TinyModel(lr=0.1, momentum=0.9)
    trainer(strategy(swarm), max_epochs=4).fit(resumed, loader(64, 8), ckpt_path=tmp_path / "stopped.ckpt")
    expected, _ = trained_by_hand(reference, 4)
    for got, wanted in zip(parameters(resumed), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


class _Looked:
    """What a callback has seen of an optimizer while it trained."""

    found: Any = None


def looking(look: Any) -> tuple[Any, _Looked]:
    looked = _Looked()

    class Looks(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            looked.found = look(trainer.strategy)

    return Looks(), looked


def test_a_successor_goes_on_with_the_anchors_and_the_momentum(swarm: hivenb.Swarm) -> None:
    def hand_over(chosen: HivemindStrategy) -> Any:
        rounds = chosen.optimizer.state_averager.outer_rounds
        rounds.fragments.count(80)  # put in since the last synchronization
        before = rounds.state()
        made = take_over(release(chosen.optimizer), chosen._make_optimizer, offload=False, **settings(chosen))
        chosen._optimizer = made
        saved = made.state_dict()
        made.state_averager.outer_rounds.fragments.forget()
        made.load_state_dict(saved)
        return before, saved["hivemind"]["outer_optimizer"], made.state_averager.outer_rounds.state()

    def settings(chosen: HivemindStrategy) -> dict[str, Any]:
        return {name: value for name, value in engine_settings(chosen.options).items() if name != "offload_optimizer"}

    callback, looked = looking(hand_over)
    trainer(strategy(swarm), max_epochs=2, callbacks=[callback]).fit(TinyModel(lr=0.1), loader(64, 8))
    before, after, loaded = looked.found
    assert all(one.any() for one in before["moments"])
    for name in ("anchors", "moments"):
        assert all(torch.equal(one, other) for one, other in zip(before[name], after[name], strict=True))
    assert before["samples"] == after["samples"] == loaded["samples"]
    assert before["samples"][0] >= 80, "what it has learned since weighs as much at the next synchronization"


def test_a_state_that_was_kept_has_them_too(swarm: hivenb.Swarm) -> None:
    def put_back(chosen: HivemindStrategy) -> Any:
        optimizer, kept = chosen.optimizer, KeptState()
        outer = optimizer.state_averager.outer
        assert kept.keep(optimizer, {})
        before, word = copy.deepcopy(outer.state()), outer.word.clone()
        outer.step({number: torch.ones_like(anchor) for number, anchor in enumerate(outer.anchors)})
        kept.put_back(optimizer, {})
        return before, outer.state(), torch.equal(word[1:], outer.word[1:])

    callback, looked = looking(put_back)
    trainer(strategy(swarm), max_epochs=2, callbacks=[callback]).fit(TinyModel(lr=0.1), loader(64, 8))
    before, after, is_same_word = looked.found
    assert is_same_word
    for name in ("anchors", "moments"):
        assert all(torch.equal(one, other) for one, other in zip(before[name], after[name], strict=True))


@pytest.mark.parametrize(("delayed", "pieces"), [(False, 1), (True, 2)], ids=["synchronous", "delayed, in pieces"])
@pytest.mark.slow
def test_peers_of_a_swarm_step_the_same_anchors(
    swarm: hivenb.Swarm, delayed: bool, pieces: int, eventually: Any
) -> None:
    chosen = Options(
        target_batch_size=320,
        use_local_updates=True,
        outer_optimizer="nesterov",
        outer_fragments=pieces,
        delay_state_averaging=delayed,
        grad_compression=Float16Compression(),
        matchmaking_time=2.0,
        averaging_timeout=20.0,
        run_id=f"outer-{delayed}-{pieces}",
    )
    with hivenb.Swarm.join(swarm.invite, "guest") as joined:
        runs = [
            TrainingRun(paced(number), large_batches(), swarm=one, options=chosen, accelerator="cpu")
            for number, one in enumerate((swarm, joined))
        ]
        for run in runs:
            run.start()
        eventually(lambda: all(run.status.state is RunState.TRAINING for run in runs), PATIENCE)
        averagers = [run.strategy.optimizer.state_averager for run in runs]
        assert distance(*averagers) > 0.1
        eventually(lambda: distance(*averagers) < 1e-3, PATIENCE)
        assert all(run.wait(epochs=3, timeout=PATIENCE) for run in runs)
        eventually(lambda: distance(*averagers) < 1e-3, PATIENCE)
        for run in runs:
            run.stop()


def paced(number: int) -> PacedModel:
    """A model of its own start."""
    model = in_large_batches(PacedModel(lr=0.01))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += number
    return model


def distance(first: Any, second: Any) -> float:
    apart = [(one - other).norm().item() for one, other in zip(first.outer.anchors, second.outer.anchors, strict=True)]
    return sum(apart) / sum(one.norm().item() for one in first.outer.anchors)
