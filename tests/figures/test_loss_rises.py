"""Which changes of options are blamed for a loss that rises, and which losses rise for no change's sake."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hivenb.figures.advice import advise
from hivenb.figures.history import History, OptionChange
from hivenb.figures.loss_rises import LEARNING_RATE, LEVEL, LossRise, loss_rises
from hivenb.options import Options

OPTIONS = Options(target_batch_size=64, matchmaking_time=10.0)
START = 1000.0

Curve = Callable[[int, np.random.Generator], float]


class Run:
    """A history that is written epoch by epoch, a second each."""

    def __init__(self, seed: int = 0, capacity: int = 2048) -> None:
        self.history, self.options = History(capacity), OPTIONS
        self.epoch = 0
        self._random = np.random.default_rng(seed)
        self.history.mark("run", "started", time=START, breaks_trend=True)

    @property
    def now(self) -> float:
        return START + self.epoch

    def train(self, epochs: int, curve: Curve, points: int = 1) -> Run:
        for _ in range(epochs):
            self.epoch += 1
            for point in range(points):
                time = self.now - 1 + (point + 1) / points
                self.history.record("loss", curve(self.epoch, self._random), epoch=self.epoch, time=time)
        return self

    def change(self, **changes: Any) -> Run:
        for name, after in changes.items():
            change = OptionChange(name, getattr(self.options, name), after)
            self.options = self.options.replace(**{name: after})
            self.history.mark("option", name, time=self.now + 0.001, change=change)
        return self

    def mark(self, kind: str, text: str, breaks_trend: bool = False) -> Run:
        self.history.mark(kind, text, time=self.now + 0.002, breaks_trend=breaks_trend)
        return self

    @property
    def rises(self) -> tuple[LossRise, ...]:
        return loss_rises(self.history.snapshot(), self.options)


def at(level: float, noise: float = 0.05) -> Curve:
    return lambda epoch, random: level * math.exp(noise * random.standard_normal())


def ever(run: Run, epochs: int, curve: Curve) -> bool:
    """Whether anything is blamed at any moment of so many epochs."""
    return any(run.train(1, curve).rises for _ in range(epochs))


# -- what is blamed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("points", [1, 5])
def test_a_loss_that_rises_after_a_change_is_found_within_some_epochs(points: int) -> None:
    run = Run().train(40, at(0.28), points).change(delay_compensation=False)
    assert not run.rises
    run.train(20, at(0.56), points)
    (rise,) = run.rises
    assert rise.changes == {"delay_compensation": True}
    assert rise.values == {"delay_compensation": False}
    assert (rise.before, rise.after) == pytest.approx((0.28, 0.56), rel=0.1)
    assert LEVEL <= rise.epochs <= 12
    assert rise.event.text == "delay_compensation"
    assert rise.text.startswith("since delay compensation is off, the loss went from 0.")


def test_a_slow_rise_is_found_later() -> None:
    run = Run().train(40, at(0.3, 0.02)).change(delay_compensation=False)
    run.train(30, lambda epoch, random: 0.3 * 1.03 ** (epoch - 40) * math.exp(0.02 * random.standard_normal()))
    (rise,) = run.rises
    assert 5 < rise.epochs < 30


def test_an_option_that_is_no_switch_is_told_with_both_of_its_values() -> None:
    run = Run().train(40, at(0.3)).change(target_batch_size=8).train(20, at(0.9))
    assert run.rises[0].text.startswith("since target batch size is 8 instead of 64, the loss went from ")
    run = Run().train(40, at(0.3)).change(grad_compression="uniform8bit").train(20, at(0.9))
    assert " instead of " in run.rises[0].text


def test_a_loss_below_zero_can_rise_too() -> None:
    run = Run().train(40, lambda epoch, random: -5 + 0.1 * random.standard_normal()).change(delay_compensation=False)
    run.train(20, lambda epoch, random: -3 + 0.1 * random.standard_normal())
    assert run.rises[0].after == pytest.approx(-3, abs=0.2)


def test_changes_close_together_are_named_together() -> None:
    run = Run().train(40, at(0.3)).change(delay_compensation=False).train(3, at(0.3))
    run.change(target_batch_size=128).train(20, at(0.9))
    (rise,) = run.rises
    assert rise.changes == {"delay_compensation": True, "target_batch_size": 64}
    assert " and target batch size is 128 instead of 64, the loss" in rise.text
    assert rise.event.text == "target_batch_size"


def test_of_changes_far_apart_the_one_that_did_it_is_blamed() -> None:
    run = Run().train(40, at(0.3)).change(target_batch_size=128).train(40, at(0.3))
    run.change(delay_compensation=False).train(20, at(0.9)).change(matchmaking_time=20.0)
    (rise,) = run.rises
    assert rise.changes == {"delay_compensation": True}
    run.train(30, at(0.9))
    assert [one.changes for one in run.rises] == [{"delay_compensation": True}], "what came later did no harm"


def test_a_second_harmful_change_is_found_after_the_first_was_taken_back() -> None:
    run = Run().train(40, at(0.3)).change(delay_compensation=False).train(20, at(0.9))
    run.change(delay_compensation=True)
    assert not run.rises, "taken back"
    run.train(40, at(0.3)).change(target_batch_size=8).train(20, at(0.9))
    assert [one.changes for one in run.rises] == [{"target_batch_size": 64}]


def test_it_is_said_until_the_loss_is_down_again() -> None:
    run = Run().train(40, at(0.3)).change(delay_compensation=False).train(60, at(0.9))
    assert run.rises
    run.train(LEVEL + 1, at(0.3))
    assert not run.rises


def test_a_pause_does_not_part_a_change_from_what_was_before() -> None:
    run = Run().train(40, at(0.3)).mark("run", "paused").change(delay_compensation=False).mark("run", "resumed")
    assert run.train(20, at(0.9)).rises


def test_a_stop_leaves_what_was_found() -> None:
    run = Run().train(40, at(0.3)).change(delay_compensation=False).train(20, at(0.9))
    assert run.mark("run", "stopped").mark("run", "resumed", breaks_trend=True).train(20, at(0.9)).rises
    assert not run.train(20, at(0.2)).rises


def test_a_full_history_finds_it_too() -> None:
    run = Run(capacity=128).train(200, at(0.3)).change(delay_compensation=False).train(100, at(0.9))
    assert len(run.history.snapshot().series["loss"]) < 200
    assert run.rises


# -- what is not -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "curve",
    [
        pytest.param(at(0.3, 0.02), id="level"),
        pytest.param(at(0.3, 0.8), id="noisy"),
        pytest.param(lambda epoch, random: 2.3 * math.exp(-epoch / 30) + 0.2, id="falls, then flattens"),
        pytest.param(lambda epoch, random: 2.3 * math.exp(-min(epoch, 60) / 20), id="stops falling at the change"),
        pytest.param(lambda epoch, random: 0.3 * 1.02**epoch, id="rises all the time"),
        pytest.param(lambda epoch, random: 0.3 if random.random() > 0.1 else 30.0, id="spikes"),
        pytest.param(lambda epoch, random: 0.3 * (1 + (epoch % 25) / 25), id="cycles"),
        pytest.param(lambda epoch, random: 0.3 + 0.2 * math.sin(epoch / 9), id="waves"),
        pytest.param(lambda epoch, random: random.choice([0.01, 0.02, 3.0], p=[0.6, 0.2, 0.2]), id="few samples"),
        pytest.param(lambda epoch, random: math.nan if random.random() > 0.5 else 0.3, id="half of it not finite"),
        pytest.param(lambda epoch, random: 0.0, id="nothing left"),
    ],
)
def test_what_goes_on_as_before_is_no_rise(curve: Curve, seed: int) -> None:
    run = Run(seed).train(60, curve).change(delay_compensation=False)
    assert not ever(run, 80, curve)


def test_a_few_high_epochs_are_no_rise() -> None:
    run = Run().train(40, at(0.3)).change(delay_compensation=False).train(2, at(9.0))
    assert not ever(run, 30, at(0.3))


def test_a_loss_that_is_never_finite_again_is_none_of_this() -> None:
    run = Run().train(40, at(0.3)).change(delay_compensation=False)
    assert not ever(run, 20, lambda epoch, random: math.nan)


def test_too_little_before_a_change_says_nothing() -> None:
    run = Run().train(10, at(0.3)).change(delay_compensation=False)
    assert not ever(run, 40, at(0.9))
    assert not loss_rises(History().snapshot(), OPTIONS)


def test_a_rise_long_after_a_change_is_not_its() -> None:
    run = Run().train(40, at(0.3)).change(delay_compensation=False).train(60, at(0.3))
    assert not ever(run, 40, at(0.9))


def test_a_higher_learning_rate_is_blamed_instead() -> None:
    run = Run().train(40, at(0.3)).change(delay_compensation=False)
    for rate in (0.001, 0.01):
        run.history.record(LEARNING_RATE, rate, time=run.now + 3)
    assert not ever(run, 20, at(0.9))


def test_a_schedule_that_was_changed_is_blamed_for_its_learning_rate() -> None:
    run = Run().train(40, at(0.3)).change(scheduler_fn=lambda optimizer: None)
    for rate in (0.001, 0.01):
        run.history.record(LEARNING_RATE, rate, time=run.now + 0.5)
    run.train(20, at(0.9))
    assert [one.changes for one in run.rises] == [{"scheduler_fn": None}]


def test_after_a_return_to_an_earlier_state_there_is_nothing_to_take_back() -> None:
    run = Run().train(40, at(0.3)).change(delay_compensation=False).train(20, at(0.9))
    assert run.mark("rollback", "not rolled back: TrainingError").rises
    assert not run.mark("rollback", "returned to the state of epoch 40", breaks_trend=True).rises


def test_nothing_is_compared_across_a_start() -> None:
    run = Run().train(40, at(0.3)).mark("run", "stopped").change(delay_compensation=False)
    run.mark("run", "resumed", breaks_trend=True)
    assert not ever(run, 40, at(0.9))


def test_options_that_could_not_be_changed_are_not_blamed() -> None:
    run = Run().train(40, at(0.3)).mark("option", "options not changed: OptionsError")
    assert not ever(run, 20, at(0.9))


# -- as advice -------------------------------------------------------------------------------------------------------


def test_advice_takes_it_back_with_all_that_goes_with_it() -> None:
    run = Run().train(40, at(0.28)).change(offload_optimizer=True, delay_state_averaging=True)
    run.change(delay_optimizer_step=True).train(20, at(0.56))
    (advice,) = advise(run.history.snapshot(), run.options)
    assert advice.rule == "loss has risen: offload_optimizer, delay_state_averaging, delay_optimizer_step"
    assert advice.text.startswith("Since optimizer in main memory is on and state averaging in background is on and ")
    assert advice.event is not None
    assert advice.figures["epochs"] >= LEVEL
    back = run.options.replace(**advice.changes)
    assert not any((back.offload_optimizer, back.delay_state_averaging, back.delay_optimizer_step))


def test_what_is_pickled_has_no_values_of_options_which_may_be_of_any_kind() -> None:
    run = Run().change(scheduler_fn=lambda optimizer: None)
    event = pickle.loads(pickle.dumps(run.history.snapshot())).events[-1]
    assert (event.text, event.change) == ("scheduler_fn", None)
