"""A training in which the swarm makes no step: it says so, and how many samples there were."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from lightning import Callback
from lightning.pytorch.callbacks import EarlyStopping
from tiny import TinyModel, loader, own_run, trainer

import hivenb
from hivenb.strategy import HivemindStrategy

WORDS = r"before the swarm has made a step"


def strategy(swarm: hivenb.Swarm, target: int, **kwargs: Any) -> HivemindStrategy:
    return HivemindStrategy(target, dht=swarm.dht, matchmaking_time=0.5, averaging_timeout=20.0, **own_run(), **kwargs)


class StopAtOnce(Callback):
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.should_stop = True


@pytest.mark.parametrize(
    ("options", "outcome"),
    [({}, "the model is what it was at its beginning"), ({"use_local_updates": True}, "nothing was averaged")],
    ids=["averaged gradients", "local updates"],
)
def test_it_says_how_many_samples_there_were_and_what_to_do(
    swarm: hivenb.Swarm, options: dict[str, Any], outcome: str
) -> None:
    marks: list[str] = []
    chosen = strategy(swarm, 8192, **options)
    chosen.on_notice = marks.append
    expected = rf"{WORDS}, so {outcome}: this peer gave 128 of target_batch_size=8192 samples\. Lower target_batch_size"
    with pytest.warns(UserWarning, match=expected):
        trainer(chosen, max_epochs=2).fit(TinyModel(), loader())
    assert marks == ["the swarm has made no step"]


def test_it_says_so_too_if_the_data_can_be_gone_through_once_only(swarm: hivenb.Swarm) -> None:
    with pytest.warns(UserWarning, match=f"{WORDS}.* gave 64 of"):
        trainer(strategy(swarm, 8192), max_epochs=3).fit(TinyModel(), (batch for batch in list(loader())))


def test_it_says_so_too_if_it_is_stopped_since_nothing_is_learned(swarm: hivenb.Swarm) -> None:
    callbacks = [EarlyStopping("val_loss", patience=1)]
    with pytest.warns(UserWarning, match=f"{WORDS}.* gave 128 of"):
        trainer(strategy(swarm, 8192), max_epochs=9, callbacks=callbacks).fit(TinyModel(), loader(), loader())


def test_a_run_marks_it(swarm: hivenb.Swarm) -> None:
    options = hivenb.Options(target_batch_size=8192, **own_run())
    run = hivenb.TrainingRun(TinyModel(), loader(), swarm=swarm, options=options, accelerator="cpu", max_epochs=1)

    def train_to_the_end() -> None:
        run.start()
        assert run.wait(timeout=60)

    with pytest.warns(UserWarning, match=f"{WORDS}.* gave 64 of"):
        train_to_the_end()
    assert any("the swarm has made no step" in event.text for event in run.history.snapshot().events)


@pytest.mark.parametrize(
    ("target", "flags"),
    [
        (64, {"max_epochs": 1}),
        (48, {"max_epochs": 1}),
        (8192, {"max_epochs": 1, "callbacks": [StopAtOnce()]}),
        (8192, {"max_epochs": 0}),
        (8192, {"fast_dev_run": 2}),
    ],
    ids=["a step", "a step and a part", "stopped", "no batch", "a trial"],
)
def test_it_says_nothing_otherwise(swarm: hivenb.Swarm, target: int, flags: dict[str, Any]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(strategy(swarm, target), **flags).fit(TinyModel(), loader())
    assert not [one for one in caught if WORDS in str(one.message)]


def test_a_second_fit_is_looked_at_by_itself(swarm: hivenb.Swarm) -> None:
    fitter = trainer(strategy(swarm, 64), max_epochs=1)
    fitter.fit(TinyModel(), loader())
    fitter.fit_loop.max_epochs = 2
    with pytest.warns(UserWarning, match=f"{WORDS}.* gave 32 of"):
        fitter.fit(TinyModel(), loader(32))
