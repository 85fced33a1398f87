"""A batch whose gradients are not finite changes nothing, is counted and said; too many in a row are an error."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from tiny import DELAYS, TinyModel, parameters, samples, train

from hivenb.engine.optimizer import skipped_batches
from hivenb.engine.optimizer.handover import release, take_over
from hivenb.engine.optimizer.optimizer import Optimizer
from hivenb.engine.optimizer.skipped_batches import MOST_IN_A_ROW, SAY_AGAIN_AFTER, SkippedBatches
from hivenb.errors import NotFiniteError

Make = Callable[..., Optimizer]

MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "offloaded": {"offload_optimizer": True},
    "all delays": DELAYS,
    "reused": {"reuse_grad_buffers": True},
    "local updates": {"use_local_updates": True},
}


@pytest.fixture
def make_optimizer(make_optimizer_in_memory: Make) -> Make:
    """Without processes."""
    return make_optimizer_in_memory


class Count(SkippedBatches):
    """For batches that are judged when they are brought."""

    def take(self) -> None:
        self.bring()
        super().take()

    def skip(self, where: str, lost: str) -> None:
        self.bring()
        super().skip(where, lost)


class TestCount:
    def test_a_row_ends_with_a_batch_that_counts(self) -> None:
        count = Count()
        for _ in range(3):
            for _ in range(MOST_IN_A_ROW - 1):
                count.skip("nan", "Lost")
            count.take()
        assert (count.seen, count.total, count.in_a_row) == (3 * MOST_IN_A_ROW, 3 * (MOST_IN_A_ROW - 1), 0)

    def test_too_many_in_a_row_are_an_error_that_says_which_how_many_and_what_to_do(self) -> None:
        count = Count()
        count.take()
        for _ in range(MOST_IN_A_ROW - 1):
            count.skip("nan", "Lost")
        with pytest.raises(NotFiniteError, match=r"^16 batches in a row .* batch 17 of .*\(nan\).*Lower the learning"):
            count.skip("nan", "Lost")

    def test_batches_that_the_search_for_a_loss_scale_costs_end_nothing(self) -> None:
        count, scale = Count(), [2.0**100]
        count.scale = lambda: scale[0]
        for _ in range(99):
            count.skip("inf", "Lost")
            scale[0] /= 2
        assert (count.total, count.in_a_row) == (99, 0)
        scale[0] = 1.0
        for _ in range(MOST_IN_A_ROW - 1):
            count.skip("inf", "Lost")
        with pytest.raises(NotFiniteError):
            count.skip("inf", "Lost")

    def test_it_is_said_now_and_then(self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(logging.getLogger("hivenb"), "propagate", True)
        # pytest listens there, too, if it did not propagate before
        monkeypatch.setattr(logging.getLogger("hivenb"), "handlers", [])
        now = [0.0]
        count = Count(lambda: now[0])
        with caplog.at_level(logging.WARNING, "hivenb"):
            for now[0] in (0.0, 1.0, SAY_AGAIN_AFTER - 1, SAY_AGAIN_AFTER):
                count.skip("nan in 1 of 2 gradients", "Its 8 samples do not count")
        assert [record.message for record in caplog.records] == [
            "Batch 1 is skipped: nan in 1 of 2 gradients. Its 8 samples do not count.",
            "Batch 4 is skipped: nan in 1 of 2 gradients. Its 8 samples do not count; 3 since this was said last. "
            f"It is one of 4 in a row. {NotFiniteError.REMEDY}.",
        ]


def make_for(make_optimizer: Make, model: TinyModel, mode: str, **kwargs: Any) -> Optimizer:
    if "offload_optimizer" in MODES[mode]:
        kwargs |= {"optimizer": partial(torch.optim.AdamW, lr=0.1), "params": list(model.parameters())}
    else:
        kwargs["optimizer"] = torch.optim.AdamW(model.parameters(), lr=0.1)
    return make_optimizer(**MODES[mode], **kwargs)


def train_on(model: TinyModel, optimizer: Any, seeds: Sequence[int | None], **step_kwargs: Any) -> None:
    """A batch of eight for each seed; for none, one whose gradient is not finite in one number of one parameter."""
    for seed in seeds:
        x, y = samples(8, seed=seed or 0)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model.layer(x), y).backward()
        if seed is None:
            gradient = model.layer.bias.grad
            assert gradient is not None
            gradient[0] = math.nan
        optimizer.step(**step_kwargs)


@pytest.fixture(params=[False, True], ids=["at once", "late"])
def judged_late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a batch is judged when the next one has been computed, as on a GPU."""
    if request.param:
        monkeypatch.setattr(skipped_batches, "can_be_judged_late", lambda gradients: True)
    return request.param


@pytest.mark.usefixtures("judged_late")
class TestTraining:
    @pytest.mark.parametrize("mode", MODES)
    def test_it_is_as_if_the_batch_had_not_been_there(self, make_optimizer: Make, mode: str) -> None:
        plain, model = TinyModel(), TinyModel()
        optimizer = make_for(make_optimizer, model, mode, target_batch_size=8)
        optimizer.begin()
        train_on(model, optimizer, [1, None, 2, None, None, 3], batch_size=8)
        optimizer.finish_delayed_updates()
        assert optimizer.local_epoch == 3
        assert (optimizer.skipped_batches.total, optimizer.skipped_batches.in_a_row) == (3, 0)
        assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
        if mode != "all delays":  # which make each gradient a step old
            train_on(plain, torch.optim.AdamW(plain.parameters(), lr=0.1), [1, 2, 3])
            for expected, got in zip(parameters(plain), parameters(model), strict=True):
                assert torch.allclose(expected, got, atol=1e-6)

    @pytest.mark.parametrize("seeds", [[None, 1, 2, 3], [1, None, None, 2, 3], [1, 2, None, 3]], ids=str)
    def test_an_epoch_ends_with_as_many_samples_without_it(
        self, make_optimizer: Make, seeds: Sequence[int | None]
    ) -> None:
        plain, model = TinyModel(), TinyModel()
        optimizer = make_for(make_optimizer, model, "synchronous", target_batch_size=24)
        optimizer.begin()
        train_on(model, optimizer, seeds, batch_size=8)
        assert optimizer.local_epoch == 1
        torch_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
        for seed in (1, 2, 3):
            x, y = samples(8, seed=seed)
            (torch.nn.functional.mse_loss(plain.layer(x), y) / 3).backward()
        torch_optimizer.step()
        for expected, got in zip(parameters(plain), parameters(model), strict=True):
            assert torch.allclose(expected, got, atol=1e-6)

    @pytest.mark.parametrize("mode", MODES)
    def test_its_samples_do_not_count_into_the_epoch(self, make_optimizer: Make, mode: str) -> None:
        model = TinyModel()
        optimizer = make_for(make_optimizer, model, mode, target_batch_size=1000)
        optimizer.begin()
        train_on(model, optimizer, [1, 2], batch_size=8)
        assert optimizer.local_progress.samples_accumulated == 16
        train_on(model, optimizer, [None], batch_size=8)
        optimizer.settle()
        gathered = 0 if mode == "reused" else 16  # where the batch is in the sum already, all of that is dropped
        assert optimizer.local_progress.samples_accumulated == gathered
        train_on(model, optimizer, [3], batch_size=8)
        assert optimizer.local_progress.samples_accumulated == gathered + 8
        if optimizer.grad_averager is not None:
            assert all(bool(g.isfinite().all()) for g in optimizer.grad_averager.mean_gradients() or ())

    def test_nothing_but_such_batches_ends_the_training_with_the_model_as_it_was(self, make_optimizer: Make) -> None:
        model = TinyModel()
        optimizer = make_for(make_optimizer, model, "synchronous")
        optimizer.begin()
        train_on(model, optimizer, [1], batch_size=8)
        before = parameters(model)
        with pytest.raises(NotFiniteError, match=r"the last of them batch 17 of this training \(nan or inf in 1 of 2"):
            train_on(model, optimizer, [None] * MOST_IN_A_ROW, batch_size=8)
        assert optimizer.local_epoch == 1
        for expected, got in zip(before, parameters(model), strict=True):
            assert torch.equal(expected, got)

    @pytest.mark.parametrize("mode", ["synchronous", "local updates"])
    def test_a_closure_is_called_once(self, make_optimizer: Make, mode: str) -> None:
        model, losses = TinyModel(), []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            losses.append(model.layer(torch.ones(1, 4)).sum() * math.nan)
            losses[-1].backward()
            return losses[-1].detach()

        optimizer = make_for(make_optimizer, model, mode)
        assert math.isnan(optimizer.step(closure, batch_size=8))
        optimizer.settle()
        assert optimizer.skipped_batches.total == len(losses) == 1

    def test_a_successor_goes_on_counting(self, make_optimizer: Make) -> None:
        model = TinyModel()
        optimizer = make_for(make_optimizer, model, "synchronous")
        optimizer.begin()
        train_on(model, optimizer, [None, None], batch_size=8)
        successor = take_over(release(optimizer), make_optimizer, offload=False)
        train_on(model, successor, [None], batch_size=8)
        successor.settle()
        assert (successor.skipped_batches.total, successor.skipped_batches.in_a_row) == (3, 3)
        train(model, successor, 1, batch_size=8)
        successor.settle()
        assert successor.skipped_batches.in_a_row == 0
