"""Layers that the optimizer was not given: a newcomer has the swarm's, or is told which are others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny import PacedModel, in_large_batches, large_batches
from torch import nn

import hivenb
from hivenb.engine.averaging.state_averager import TrainingStateAverager
from hivenb.errors import SwarmError
from hivenb.swarm.agreement import frozen_parameters

pytestmark = pytest.mark.process


class Tuned(PacedModel):
    """A head on frozen features, which are others with each seed.

    :param follows: whether the features change while it trains, as a target network does
    """

    def __init__(self, seed: int, follows: bool = False):
        super().__init__(torch.optim.AdamW, lr=0.01)
        torch.manual_seed(seed)
        self.features = nn.Linear(4, 4).requires_grad_(False)
        self._follows = follows

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(self.pace)
        return nn.functional.mse_loss(self.layer(self.features(batch[0]).tanh()), batch[1])

    def on_train_batch_end(self, *args: Any) -> None:
        if self._follows:
            self.features.weight.data.add_(1.0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=0.01)


def run_of(swarm: hivenb.Swarm, model: Tuned, **options: Any) -> hivenb.TrainingRun:
    own = hivenb.Options(target_batch_size=256, matchmaking_time=2.0, **options)
    return hivenb.TrainingRun(in_large_batches(model), large_batches(), swarm=swarm, options=own, accelerator="cpu")


@contextmanager
def one_trains(model: Tuned) -> Iterator[tuple[hivenb.TrainingRun, Callable[..., hivenb.TrainingRun]]]:
    """Gives a run that trains, and a function that makes another one of a peer that joins."""
    with hivenb.Swarm("a") as first, hivenb.Swarm.join(first.invite, "b") as second:
        run = run_of(first, model)
        run.start()
        assert run.wait(epochs=3, timeout=60)
        made: list[hivenb.TrainingRun] = []

        def join(model: Tuned, **options: Any) -> hivenb.TrainingRun:
            made.append(run_of(second, model, **options))
            made[-1].start()
            return made[-1]

        yield run, join
        for one in (*made, run):
            one.stop()


def test_a_newcomer_takes_over_small_ones() -> None:
    with one_trains(Tuned(0)) as (run, join):
        joined = join(Tuned(1))
        assert joined.wait(epochs=2, timeout=60)
        assert "features.weight and 1 more" in " ".join(joined.log_lines)
    assert run.model.features.weight.equal(joined.model.features.weight)
    assert run.model.features.bias.equal(joined.model.features.bias)


def test_a_newcomer_with_the_same_ones_downloads_none_and_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(TrainingStateAverager, "download_rest", lambda *args: calls.append(args))
    with one_trains(Tuned(0)) as (_, join):
        assert join(Tuned(0)).wait(epochs=2, timeout=60)
    assert calls == []


def test_large_ones_that_differ_are_refused_by_their_name_or_downloaded_or_kept_if_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frozen_parameters, "MOST_SENT", 8)
    with one_trains(Tuned(0)) as (run, join):
        with pytest.raises(SwarmError, match=r"features\.weight .* has other values, and 1 more.*frozen_parameters"):
            join(Tuned(1)).wait(epochs=1, timeout=60)
        own = Tuned(1)
        kept = own.features.weight.clone()
        joined = join(own, frozen_parameters="own")
        assert joined.wait(epochs=1, timeout=60)
        joined.stop()
        assert own.features.weight.equal(kept)
        joined = join(Tuned(1), frozen_parameters="download")
        assert joined.wait(epochs=1, timeout=60)
        assert run.model.features.weight.equal(joined.model.features.weight)


def test_what_training_changes_comes_with_the_state(eventually: Callable[..., None]) -> None:
    with one_trains(Tuned(0, follows=True)) as (run, join):
        moved = float(run.model.features.weight.mean())
        assert moved > 5
        joined = join(Tuned(0, follows=True))
        eventually(lambda: float(joined.model.features.weight.mean()) > moved, 60)
        assert joined.model.features.weight.mean() < 1.5 * run.model.features.weight.mean(), (
            "it has not come there alone"
        )


def test_peers_that_begin_at_the_same_time_come_to_have_the_same_ones(eventually: Callable[..., None]) -> None:
    with hivenb.Swarm("a") as first, hivenb.Swarm.join(first.invite, "b") as second:
        runs = [run_of(one, Tuned(seed)) for seed, one in enumerate((first, second))]
        for run in runs:
            run.start()
        one, other = (run.model.features for run in runs)
        eventually(lambda: one.weight.equal(other.weight) and one.bias.equal(other.bias), 60)
        for run in runs:
            assert run.wait(epochs=2, timeout=60)
        for run in runs:
            run.stop()
    assert one.weight.equal(other.weight)
