"""An error of the user's optimizer, hooks or scheduler ends the run, and the model is as the last good step left it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from lightning import Callback
from tiny import DELAYS, PacedModel, TinyModel, loader, own_run, parameters, samples, trainer
from torch.optim.lr_scheduler import LambdaLR

import hivenb
from hivenb.run.status import RunState
from hivenb.strategy import HivemindStrategy
from hivenb.view.text import summary

MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "averaging in background": {"delay_state_averaging": True},
    "offloaded": {"offload_optimizer": True},
    "all delays": DELAYS,
}

#: Steps before the one that fails, of which the model then has all.
GOOD = 3


class BrokenError(ArithmeticError):
    """No other code raises this."""


class Failing(torch.optim.SGD):
    """Fails from one of its steps on.

    :param good: steps before that
    :param where: in that step: ``before`` it does anything, ``halfway``, or ``after``
    :param seen: gets the parameters after each step that was good
    """

    def __init__(self, params: Any, lr: float, good: int, where: str, seen: list[list[torch.Tensor]]):
        super().__init__(params, lr=lr)
        self.good, self.where, self.seen = good, where, seen
        self.steps = -1  # the first one is made to allocate statistics

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        is_bad = self.steps > self.good
        if is_bad and self.where == "halfway":
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
        if is_bad and self.where != "after":
            raise BrokenError(f"step {self.steps}")
        super().step(closure)
        if is_bad:
            raise BrokenError(f"step {self.steps}")
        self.seen.append([p.detach().float().clone() for group in self.param_groups for p in group["params"]])


class Ending(LambdaLR):
    """Fails when it is stepped once too often, which it does not say before."""

    def __init__(self, optimizer: Any):
        super().__init__(optimizer, lambda step: 1 / (1 + step))

    def step(self, *args: Any) -> None:
        if self.last_epoch + 1 >= GOOD:
            raise BrokenError("past its end")
        super().step(*args)


def strategy(swarm: hivenb.Swarm, target: int = 8, **kwargs: Any) -> HivemindStrategy:
    settings = {"matchmaking_time": 0.5, "averaging_timeout": 20.0, **own_run(), **kwargs}
    return HivemindStrategy(target, dht=swarm.dht, **settings)


def failing(seen: list[list[torch.Tensor]], where: str, model: Callable[..., TinyModel] = TinyModel) -> TinyModel:
    return model(partial(Failing, good=GOOD, where=where, seen=seen))


def assert_equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=0.0, atol=0.0)


def plainly_trained(steps: int, lr: float = 0.05) -> list[torch.Tensor]:
    """By plain torch, with one batch for each swarm epoch."""
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    x, y = samples(64)
    for start in range(0, 8 * steps, 8):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model.layer(x[start : start + 8]), y[start : start + 8]).backward()
        optimizer.step()
    return parameters(model)


@pytest.mark.parametrize("where", ["before", "halfway", "after"])
@pytest.mark.parametrize("mode", MODES)
def test_an_optimizer_that_fails_ends_the_run(swarm: hivenb.Swarm, mode: str, where: str) -> None:
    seen: list[list[torch.Tensor]] = []
    model, chosen = failing(seen, where), strategy(swarm, **MODES[mode])
    with pytest.raises(BrokenError, match=f"step {GOOD + 1}") as caught:
        trainer(chosen, max_epochs=4).fit(model, loader(64, 8))
    assert any(entry.name == "step" and str(entry.path) == __file__ for entry in caught.traceback)
    assert "epoch 4" in "".join(getattr(caught.value, "__notes__", ["epoch 4"]))
    assert len(seen) == GOOD + 1
    assert_equal(parameters(model), seen[-1])
    assert chosen.hivemind_epoch == GOOD
    if mode != "all delays":  # its steps lag behind
        for one, other in zip(parameters(model), plainly_trained(GOOD), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
@pytest.mark.parametrize("mode", MODES)
def test_so_it_does_in_other_precisions(swarm: hivenb.Swarm, mode: str, precision: Any) -> None:
    seen: list[list[torch.Tensor]] = []
    model = failing(seen, "halfway")
    with pytest.raises(BrokenError):
        trainer(strategy(swarm, **MODES[mode]), max_epochs=4, precision=precision).fit(model, loader(64, 8))
    for one, other in zip(parameters(model), seen[-1], strict=True):
        torch.testing.assert_close(one.float(), other.to(one.dtype).float(), rtol=0.0, atol=0.0)


def test_the_last_step_of_all_may_be_the_one_that_fails(swarm: hivenb.Swarm) -> None:
    """In the background, with no batch after it."""
    seen: list[list[torch.Tensor]] = []
    model = failing(seen, "before")
    with pytest.raises(BrokenError):
        trainer(strategy(swarm, **DELAYS), max_steps=GOOD + 1).fit(model, loader(64, 8))
    assert_equal(parameters(model), seen[-1])


@pytest.mark.parametrize("mode", ["synchronous", "averaging in background"])
@pytest.mark.parametrize("hook", ["register_step_pre_hook", "register_step_post_hook"])
def test_a_hook_that_fails_ends_the_run(swarm: hivenb.Swarm, mode: str, hook: str) -> None:
    class Hooked(TinyModel):
        steps = 0

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            getattr(optimizer, hook)(self.fail)
            return optimizer

        def fail(self, *args: Any) -> None:
            self.steps += 1
            if self.steps > GOOD:
                raise BrokenError(hook)

    model, chosen = Hooked(), strategy(swarm, **MODES[mode])
    with pytest.raises(BrokenError, match=hook):
        trainer(chosen, max_epochs=4).fit(model, loader(64, 8))
    for one, other in zip(parameters(model), plainly_trained(GOOD), strict=True):
        torch.testing.assert_close(one, other)
    assert chosen.hivemind_epoch == GOOD


@pytest.mark.parametrize("mode", MODES)
def test_what_is_no_exception_ends_the_run_too(swarm: hivenb.Swarm, mode: str) -> None:
    class Quitting(torch.optim.SGD):
        steps = -1

        def step(self, closure: Any = None) -> Any:
            type(self).steps += 1
            if self.steps > GOOD:
                raise SystemExit(3)
            return super().step(closure)

    with pytest.raises(SystemExit):
        trainer(strategy(swarm, **MODES[mode]), max_epochs=4).fit(TinyModel(Quitting), loader(64, 8))


@pytest.mark.parametrize("mode", MODES)
def test_a_scheduler_that_is_stepped_past_its_end_ends_the_run(swarm: hivenb.Swarm, mode: str) -> None:
    """The step before it was a good one, which the model has, as in plain torch."""
    seen: list[list[torch.Tensor]] = []
    model = TinyModel(partial(Failing, good=99, where="", seen=seen))
    chosen = strategy(swarm, scheduler_fn=Ending, **MODES[mode])
    with pytest.raises(BrokenError, match="past its end"):
        trainer(chosen, max_epochs=4).fit(model, loader(64, 8))
    assert_equal(parameters(model), seen[-1])
    assert chosen.hivemind_epoch == len(seen) - 1 >= GOOD
    if mode != "all delays":
        plain = TinyModel()
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
        scheduler, (x, y) = Ending(optimizer), samples(64)
        for start in range(0, 8 * chosen.hivemind_epoch, 8):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(plain.layer(x[start : start + 8]), y[start : start + 8]).backward()
            optimizer.step()
            with suppress(BrokenError):  # as in the run, with the last one
                scheduler.step()
        for one, other in zip(parameters(model), parameters(plain), strict=True):
            torch.testing.assert_close(one, other)


def test_a_scheduler_from_configure_optimizers_too(swarm: hivenb.Swarm) -> None:
    model = TinyModel(scheduler=Ending)
    with pytest.raises(BrokenError, match="past its end"):
        trainer(strategy(swarm), max_epochs=4).fit(model, loader(64, 8))


@pytest.mark.parametrize("mode", MODES)
def test_a_training_run_says_what_ended_it(swarm: hivenb.Swarm, mode: str) -> None:
    seen: list[list[torch.Tensor]] = []
    model = failing(seen, "halfway")
    options = hivenb.Options(target_batch_size=8, matchmaking_time=0.5, **own_run(), **MODES[mode])
    run = hivenb.TrainingRun(model, loader(64, 8), swarm=swarm, options=options, accelerator="cpu", max_epochs=4)
    run.start()
    with pytest.raises(BrokenError, match="step 4"):
        run.wait(timeout=60)
    assert run.status.state is RunState.FAILED
    assert run.status.error == "BrokenError: step 4"
    assert "failed: BrokenError: step 4" in summary(run.status, run.history.snapshot())
    assert_equal(parameters(model), seen[-1])
    run.start()  # goes on from there, with a new optimizer that fails as late
    with pytest.raises(BrokenError, match="step 4"):
        run.wait(timeout=60)
    assert run.strategy is not None
    assert run.strategy.hivemind_epoch == 2 * GOOD
    assert_equal(parameters(model), seen[-1])


# -- with another peer ---------------------------------------------------------------------------------------------


class Until(Callback):
    """Ends training when there is enough.

    :param enough: asked after each epoch, with that epoch and the number of peers that averaged their gradients in it
    """

    def __init__(self, enough: Callable[[int, int], bool]):
        self._enough = enough

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        def ended(report: Any) -> None:
            trainer.should_stop = trainer.should_stop or self._enough(report.epoch, report.group_size)

        trainer.strategy.on_epoch = ended


class WaitForTheOther(Callback):
    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        end = threading.Event()
        for _ in range(600):
            if self.is_seen or trainer.strategy.num_peers > 1:
                self.is_seen = True
                return
            end.wait(0.05)
        raise TimeoutError("saw nobody")

    is_seen = False


@pytest.fixture
def swarms() -> Iterator[tuple[hivenb.Swarm, hivenb.Swarm]]:
    """Two peers' DHTs, joined."""
    with hivenb.Swarm("failing") as one, hivenb.Swarm("going-on", initial_peers=one.invite) as other:
        yield one, other


@pytest.mark.parametrize("mode", ["synchronous", "all delays"])
@pytest.mark.slow
def test_the_other_peers_go_on(swarms: tuple[hivenb.Swarm, hivenb.Swarm], mode: str) -> None:
    """Whoever fails leaves no round, lock or process behind, and ends soon."""
    seen: list[list[torch.Tensor]] = []
    model, goes_on = failing(seen, "halfway", PacedModel), PacedModel()
    has_failed, epochs, met = threading.Event(), [], []

    def enough(epoch: int, group_size: int) -> bool:
        epochs.append(epoch)
        met.append(group_size)
        return has_failed.is_set() and epoch > GOOD + 3

    def fit(swarm: hivenb.Swarm, model: TinyModel, *more: Callback) -> None:
        chosen = strategy(swarm, 64, run_id="failing", **MODES[mode])
        trainer(chosen, max_epochs=-1, callbacks=[WaitForTheOther(), *more]).fit(model, loader(64, 8))

    other = threading.Thread(target=fit, args=(swarms[1], goes_on, Until(enough)))
    other.start()
    try:
        with pytest.raises(BrokenError):
            fit(swarms[0], model)
    finally:
        has_failed.set()
        other.join(90)
    assert not other.is_alive()
    assert 2 in met, "they averaged"
    assert epochs[-1] > GOOD + 3
    assert all(bool(parameter.isfinite().all()) for parameter in [*parameters(model), *parameters(goes_on)])
