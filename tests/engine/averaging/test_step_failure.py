"""What is done so that a step that fails can be undone, and what is not done for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from in_memory.real_time import RealTimeDHT

from hivenb.engine.averaging.state_averager import TrainingStateAverager


class Thorny(torch.optim.SGD):
    """Fails in the middle of a step when it is told to, and not before it may."""

    is_to_fail = False

    def __init__(self, params: Any, lr: float):
        super().__init__(params, lr=lr)
        self.may_end = threading.Event()
        self.may_end.set()

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        assert self.may_end.wait(20)
        if self.is_to_fail:
            raise ArithmeticError("thorny")


@pytest.fixture
def make_state_averager(memory_dht: RealTimeDHT, run_id: str) -> Iterator[Callable[..., TrainingStateAverager]]:
    made: list[TrainingStateAverager] = []

    def make(parameters: Any, **kwargs: Any) -> TrainingStateAverager:
        if kwargs.get("offload_optimizer"):
            kwargs |= {"optimizer": partial(Thorny, lr=0.1), "params": [{"params": parameters}]}
        kwargs.setdefault("optimizer", None)
        kwargs["optimizer"] = kwargs["optimizer"] or Thorny(parameters, lr=0.1)
        made.append(TrainingStateAverager(dht=memory_dht, prefix=run_id, start=True, **kwargs))
        return made[-1]

    yield make
    for averager in made:
        averager.shutdown()


def parameter(value: float = 0.0) -> torch.nn.Parameter:
    one = torch.nn.Parameter(torch.full((3,), value))
    one.grad = torch.ones(3)
    return one


def end_epoch(averager: TrainingStateAverager, **kwargs: Any) -> None:
    averager.step(increment_epoch=True, optimizer_step=True, **kwargs)


def fail(averager: TrainingStateAverager, **kwargs: Any) -> None:
    averager.optimizer.is_to_fail = True  # type: ignore[attr-defined]
    with pytest.raises(ArithmeticError, match="thorny"):
        end_epoch(averager, **kwargs)


def fail_in_background(averager: TrainingStateAverager) -> None:
    optimizer: Any = averager.optimizer
    optimizer.is_to_fail = True
    optimizer.may_end.clear()
    end_epoch(averager, delay_optimizer_step=True)
    optimizer.may_end.set()


@pytest.mark.parametrize("offloaded", [False, True])
def test_the_parameters_and_the_epoch_are_those_before_the_step(make_state_averager: Any, offloaded: bool) -> None:
    model = parameter()
    averager = make_state_averager([model], offload_optimizer=offloaded)
    end_epoch(averager)
    torch.testing.assert_close(model.detach(), torch.full((3,), -0.1))
    with torch.no_grad():
        (model if not offloaded else averager.optimizer.param_groups[0]["params"][0]).mul_(2.0)
    averager._apply_optimizer_parameters_() if offloaded else None
    fail(averager)
    torch.testing.assert_close(model.detach(), torch.full((3,), -0.2))
    assert averager.local_epoch == 1
    assert not averager.lock_optimizer.locked()
    own = averager.optimizer.param_groups[0]["params"][0]
    assert torch.equal(own.detach(), model.detach())
    metadata, tensors, _ = averager.get_current_state()
    assert metadata["epoch"] == 1
    assert torch.equal(tensors[0].detach(), model.detach())


def test_it_is_raised_again_by_all_that_would_go_on_but_not_by_what_ends(make_state_averager: Any) -> None:
    averager = make_state_averager([parameter()])
    fail(averager)
    with pytest.raises(ArithmeticError):
        averager.step(apply_delayed_updates=True)
    averager.step(wait_for_delayed_updates=True)


def test_what_fails_in_the_background_is_raised_by_the_next_step(make_state_averager: Any) -> None:
    model = parameter()
    averager = make_state_averager([model], offload_optimizer=True)
    fail_in_background(averager)
    with pytest.raises(ArithmeticError):
        averager.step(wait_for_delayed_updates=True)
    assert torch.equal(model.detach(), torch.zeros(3))
    assert averager.local_epoch == 0


def test_it_can_be_held_back_until_all_is_ended(make_state_averager: Any) -> None:
    averager = make_state_averager([parameter()], offload_optimizer=True)
    fail_in_background(averager)
    done = []

    def end() -> None:
        with averager.failure_held_back():
            averager.step(wait_for_delayed_updates=True)
            done.append(True)

    with pytest.raises(ArithmeticError):
        end()
    assert done


def test_a_trigger_that_fails_leaves_out_the_step(make_state_averager: Any) -> None:
    """What loads averaged gradients in the background, for one."""

    def trigger() -> None:
        raise ArithmeticError("trigger")

    model = parameter()
    averager = make_state_averager([model], offload_optimizer=True, custom_gradients=True)
    with pytest.raises(ArithmeticError, match="trigger"):
        end_epoch(averager, wait_for_trigger=trigger)
    assert torch.equal(model.detach(), torch.zeros(3))
    assert averager.local_epoch == 0


def test_a_round_that_fails_is_missed(make_state_averager: Any) -> None:
    """There is nobody to be met."""
    model = parameter()
    averager = make_state_averager([model], min_matchmaking_time=0.1)
    end_epoch(averager, averaging_round=True, averaging_opts={"timeout": 1.0})
    torch.testing.assert_close(model.detach(), torch.full((3,), -0.1))


def test_parameters_are_copied_only_where_the_buffers_hold_something_else(
    make_state_averager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    averager = make_state_averager([parameter()], min_matchmaking_time=0.1)
    taken: list[str] = []
    original = averager.get_tensors
    monkeypatch.setattr(averager, "get_tensors", lambda: (taken.append(threading.current_thread().name), original())[1])
    end_epoch(averager)
    assert len(taken) == 1
    end_epoch(averager, averaging_round=True, averaging_opts={"timeout": 1.0})
    assert len(taken) == 4, "copied before the step, loaded for the round, applied after it"
    end_epoch(averager)
    assert len(taken) == 4, "the round has left them there"
    averager.step(optimizer_step=True)
    assert len(taken) == 4, "one of many local steps"
