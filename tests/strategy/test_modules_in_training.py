"""Two trainings never share one module: the second one is refused, and the first goes on as if nothing had been."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lightning import Callback, Trainer
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.utilities.model_helpers import is_overridden
from tiny import QUIET, TinyModel, loader, own_run, parameters, trainer

import hivenb
from hivenb.errors import TrainingError
from hivenb.options.options import Options
from hivenb.strategy import HivemindStrategy
from hivenb.strategy.checks import hold, let_go, run_that_trains
from hivenb.strategy.module_hooks import ModuleHooks

PATIENCE = 60.0
CLIPPED = {"gradient_clip_val": 0.01, "max_epochs": 4}


def strategy(swarm: hivenb.Swarm, **kwargs: Any) -> HivemindStrategy:
    own = {"matchmaking_time": 0.5, "averaging_timeout": 20.0, **own_run(), **kwargs}
    return HivemindStrategy(16, dht=swarm.dht, **own)


class Wait(Callback):
    """Holds training after its third batch."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3:
            self.reached.set()
            assert self.go_on.wait(PATIENCE)


@contextmanager
def living(model: TinyModel, chosen: HivemindStrategy) -> Iterator[Future[None]]:
    """A training in another thread, held in its second epoch until the end of the block."""
    wait = Wait()
    with ThreadPoolExecutor() as executor:
        done = executor.submit(trainer(chosen, callbacks=[wait], **CLIPPED).fit, model, loader(64, 16))
        try:
            assert wait.reached.wait(PATIENCE)
            yield done
        finally:
            wait.go_on.set()


def plainly_trained() -> list[torch.Tensor]:
    plain = TinyModel()
    Trainer(**QUIET, **CLIPPED).fit(plain, loader(64, 16))
    return parameters(plain)


def assert_same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("task", ["fit", "validate"])
def test_a_second_training_is_refused_and_damages_nothing(swarm: hivenb.Swarm, task: str) -> None:
    model, first = TinyModel(), strategy(swarm, run_id="the-first", reuse_grad_buffers=True)
    with living(model, first) as done:
        assert run_that_trains(model) == "the-first"
        hooks, its_trainer = dict(vars(model)), model.trainer
        second = trainer(strategy(swarm, run_id="the-second"), **CLIPPED)
        with pytest.raises(TrainingError, match=r"TinyModel is being trained .* 'the-first'.*copy\.deepcopy.* stop"):
            getattr(second, task)(model, loader(64, 16))
        assert vars(model) == hooks
        assert model.trainer is its_trainer
    assert done.result(PATIENCE) is None
    assert_same(parameters(model), plainly_trained())


def test_a_copy_of_one_in_training_is_trained_as_it_would_be(swarm: hivenb.Swarm) -> None:
    """With its own clipping, which the living one leaves to the step of the swarm."""
    model = TinyModel()
    with living(model, strategy(swarm, reuse_grad_buffers=True)):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for one in copies:
            one.load_state_dict(TinyModel().state_dict())
        trainer(strategy(swarm), **CLIPPED).fit(copies[0], loader(64, 16))
        Trainer(**QUIET, **CLIPPED).fit(copies[1], loader(64, 16))
        for one in copies:
            assert_same(parameters(one), plainly_trained())


def test_one_whose_training_has_ended_may_be_trained_again(swarm: hivenb.Swarm) -> None:
    class Broken(TinyModel):
        is_broken = True

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if self.is_broken:
                raise ValueError("broken")
            return super().training_step(batch, batch_idx)

    model = Broken()
    kept = trainer(strategy(swarm), max_epochs=1)
    with pytest.raises(ValueError, match="broken"):
        kept.fit(model, loader(64, 16))
    assert run_that_trains(model) is None
    model.is_broken = False
    for _ in range(2):
        chosen = strategy(swarm)
        trainer(chosen, max_epochs=1).fit(model, loader(64, 16))
        assert chosen.hivemind_epoch == 4


class TestHolding:
    class Somebody:
        options = Options(target_batch_size=8, run_id="somebody")

    def test_another_module_is_another_matter(self) -> None:
        one, other = self.Somebody(), self.Somebody()
        first, second = TinyModel(), TinyModel()
        hold(first, one)
        hold(first, one)
        hold(second, other)
        let_go(one)
        hold(first, other)
        with pytest.raises(TrainingError):
            hold(second, one)
        let_go(other)

    def test_who_is_gone_has_nothing(self) -> None:
        """As when an error comes before there is anything to tear down."""
        model, somebody = TinyModel(), self.Somebody()
        hold(model, somebody)
        assert run_that_trains(model) == "somebody"
        del somebody
        gc.collect()
        assert run_that_trains(model) is None


class TestHooks:
    def test_those_of_two_are_restored_in_any_order_without_an_error(self) -> None:
        model = TinyModel()
        first, second = ModuleHooks(model), ModuleHooks(model)
        for hooks in (first, second):
            hooks.disable_zero_grad()
        first.restore()
        second.restore()
        second.restore()
        assert model.optimizer_zero_grad.__func__ is TinyModel.optimizer_zero_grad

    def test_of_each_batch_lightning_enters_only_those_that_somebody_has_overridden(self, swarm: hivenb.Swarm) -> None:
        seen: list[str] = []

        class Own(TinyModel):
            def on_after_backward(self) -> None:
                seen.append("on_after_backward")

        class Adds(Callback):
            """Gives the module a hook that it has not had."""

            def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
                pl_module.on_before_zero_grad = lambda optimizer: seen.append("on_before_zero_grad")

        model, profiler = Own(), SimpleProfiler()
        model.on_train_batch_end = lambda *args: seen.append("on_train_batch_end")
        own = dict(vars(model))
        given = trainer(strategy(swarm), max_epochs=1, callbacks=[Adds()], profiler=profiler)
        given.fit(model, loader(64, 16))
        assert Counter(seen) == dict.fromkeys(("on_after_backward", "on_before_zero_grad", "on_train_batch_end"), 4)
        entered = {name for name in profiler.recorded_durations if name.startswith("[LightningModule]Own.on_")}
        empty = {"on_train_batch_start", "on_before_backward", "on_before_optimizer_step"}
        assert not {f"[LightningModule]Own.{name}" for name in empty} & entered
        assert model.on_train_batch_end is own["on_train_batch_end"]
        assert vars(model)["on_before_zero_grad"] is not None, "it was not hivenb's to take away"
        assert not empty & set(vars(model))

    def test_one_that_is_passed_over_is_there_in_a_copy(self, swarm: hivenb.Swarm) -> None:
        model = TinyModel()
        with living(model, strategy(swarm)):
            assert not is_overridden("on_after_backward", model)
            for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                assert one.on_after_backward() is None
                assert one.on_after_backward.__self__ is one
        assert model.on_after_backward() is None

    def test_clipping_is_off_an_optimizer_that_is_used_again(self, swarm: hivenb.Swarm) -> None:
        model = TinyModel()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model.configure_optimizers = lambda: optimizer
        for _ in range(2):
            trainer(strategy(swarm), gradient_clip_val=0.01, max_epochs=1).fit(model, loader(64, 16))
            gc.collect()
        optimizer.step()  # with the hook of a Trainer that is gone, a ReferenceError
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
