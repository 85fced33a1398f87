"""Data that can be gone through only once: training says so, and ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tiny
from torch.utils.data import DataLoader, IterableDataset

from hivenb.errors import TrainingError
from hivenb.options import Options
from hivenb.run.status import RunState
from hivenb.strategy import HivemindStrategy
from hivenb.training import TrainingRun

pytestmark = pytest.mark.process

PATIENCE = 60.0


def once(batches: int = 8) -> Iterator[Any]:
    yield from list(tiny.loader(8 * batches))


class Once(IterableDataset):
    """Of samples that are given once."""

    def __init__(self) -> None:
        self._samples = iter(tiny.loader(64).dataset)

    def __iter__(self) -> Iterator[Any]:
        return self._samples


DATA = {"a generator": once, "a DataLoader of one": lambda: DataLoader(Once(), batch_size=8)}


def train_to_the_end(run: TrainingRun) -> None:
    run.start()
    assert run.wait(timeout=PATIENCE), "it trains without a batch"


@pytest.mark.parametrize("max_epochs", [-1, 5])
@pytest.mark.parametrize("kind", DATA)
def test_fit_ends_when_there_is_no_batch_any_more_and_says_so(swarm, kind, max_epochs):
    strategy = HivemindStrategy(32, dht=swarm.dht, **tiny.own_run())
    trainer = tiny.trainer(strategy, max_epochs=max_epochs)
    with pytest.warns(UserWarning, match=r"the training data .* gave no batch in pass 2 .*give a DataLoader"):
        trainer.fit(tiny.TinyModel(), DATA[kind]())
    assert trainer.state.finished
    assert (trainer.global_step, strategy.hivemind_epoch) == (8, 2)
    assert strategy.data_is_exhausted


def test_a_run_ends_as_finished_and_its_history_says_why(swarm):
    run = TrainingRun(
        tiny.TinyModel(),
        once(),
        swarm=swarm,
        options=Options(target_batch_size=32, **tiny.own_run()),
        accelerator="cpu",
        max_epochs=-1,
    )
    with pytest.warns(UserWarning, match="gave no batch in pass 2"):
        train_to_the_end(run)
    assert run.status.state is RunState.FINISHED
    assert run.status.step == 8
    assert any("gave no batch any more" in event.text for event in run.history.snapshot().events)
    run.start()
    with pytest.raises(TrainingError, match="gave no batches"):
        run.wait(timeout=PATIENCE)


def test_data_with_several_passes_trains_on(swarm):
    strategy = HivemindStrategy(32, dht=swarm.dht, **tiny.own_run())
    trainer = tiny.trainer(strategy, max_epochs=3)
    for expected in (24, 24):  # a second fit of the same Trainer is over at once, as its epochs are
        trainer.fit(tiny.TinyModel(), tiny.loader(64))
        assert trainer.global_step == expected
        assert not strategy.data_is_exhausted
    assert sum(type(callback).__name__ == "FirstCallback" for callback in trainer.callbacks) == 1
