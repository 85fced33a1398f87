"""trainer.estimated_stepping_batches, of which fine-tuning scripts make their schedules, counts the swarm's steps."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning import Callback, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tiny import TinyModel, loader, own_run, samples, trainer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

import hivenb
from hivenb.strategy import HivemindStrategy
from hivenb.strategy.counted_batches import SampleCount
from hivenb.strategy.estimated_steps import EstimatedSteps, Pass, epochs_in, pass_over


def linear(step: int, *, num_training_steps: int) -> float:
    return max(0.0, 1 - step / num_training_steps)


#: By its name, what a script makes of an optimizer and a number of steps.
SCHEDULES: dict[str, Any] = {
    "a closure": lambda optimizer, total: LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total)),
    "of transformers": lambda optimizer, total: LambdaLR(optimizer, partial(linear, num_training_steps=total)),
    "cosine": lambda optimizer, total: CosineAnnealingLR(optimizer, T_max=total),
    "one cycle": lambda optimizer, total: OneCycleLR(optimizer, max_lr=1.0, total_steps=total),
}


class Scheduled(TinyModel):
    """With a schedule of as many steps as ``count`` says, by default of those that the Trainer expects."""

    def __init__(self, schedule: str = "a closure", count: Any = lambda trainer: trainer.estimated_stepping_batches):
        super().__init__()
        self.schedule, self.count, self.total, self.seen = schedule, count, 0, []

    def setup(self, stage: str) -> None:
        self.seen.append(self.trainer.estimated_stepping_batches)

    def configure_optimizers(self) -> Any:
        self.total = self.count(self.trainer)
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return [optimizer], [{"scheduler": SCHEDULES[self.schedule](optimizer, self.total), "interval": "step"}]

    def on_train_start(self) -> None:
        self.seen.append(self.trainer.estimated_stepping_batches)


def strategy(swarm: hivenb.Swarm, target: int, **kwargs: Any) -> HivemindStrategy:
    return HivemindStrategy(target, dht=swarm.dht, matchmaking_time=0.5, **own_run(), **kwargs)


def fit(
    swarm: hivenb.Swarm, model: Any, data: Any, target: int, options: Any = None, **kwargs: Any
) -> tuple[HivemindStrategy, float, list[str]]:
    """The strategy after training, the rate that it has ended with, and what was warned of."""
    chosen = strategy(swarm, target, **(options or {}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(chosen, **kwargs).fit(model, data)
    said = [str(one.message) for one in caught if "schedul" in str(one.message) or "estimated" in str(one.message)]
    assert chosen.optimizer is not None
    return chosen, chosen.optimizer.opt.param_groups[0]["lr"], said


@pytest.mark.parametrize(
    ("count", "target", "options", "kwargs", "epochs"),
    [
        (64, 16, {}, {"max_epochs": 2}, 8),
        (64, 16, {}, {"max_epochs": 1, "accumulate_grad_batches": 2}, 4),
        (64, 16, {}, {"max_epochs": -1, "max_steps": 6}, 3),
        (64, 16, {}, {"max_epochs": 3, "max_steps": 6}, 3),
        (64, 16, {}, {"max_epochs": 2, "limit_train_batches": 3}, 3),
        (64, 16, {}, {"max_epochs": 2, "limit_train_batches": 0.5}, 4),
        (61, 12, {}, {"max_epochs": 2}, 8),
        (64, 16, {"batch_size": 16}, {"max_epochs": 1}, 8),
        (64, 16, {"offload_optimizer": True}, {"max_epochs": 1}, 4),
    ],
)
def test_a_schedule_of_it_ends_with_training(
    swarm: hivenb.Swarm, count: int, target: int, options: Any, kwargs: Any, epochs: int
) -> None:
    model = Scheduled()
    chosen, rate, said = fit(swarm, model, loader(count, 8), target, options, **kwargs)
    assert model.total == chosen.hivemind_epoch == epochs
    assert rate == 0.0
    assert said == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_whatever_the_schedule(swarm: hivenb.Swarm, schedule: str) -> None:
    _, rate, said = fit(swarm, Scheduled(schedule), loader(64, 8), 16, max_epochs=2)
    assert rate == pytest.approx(0.0, abs=1e-4)
    assert said == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_beyond_its_end_it_keeps_its_last_rate(swarm: hivenb.Swarm, schedule: str) -> None:
    """As where others take part: the swarm makes more epochs than a peer alone. OneCycleLR would end the training."""

    class EndsLater(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.fit_loop.epoch_loop.max_steps = 14

    notices: list[str] = []
    model = Scheduled(schedule)
    chosen = strategy(swarm, 16)
    chosen.on_notice = notices.append
    trainer(chosen, max_epochs=-1, max_steps=8, callbacks=[EndsLater()]).fit(model, loader(64, 8))
    assert chosen.hivemind_epoch == 7
    assert model.total == 4
    assert chosen.optimizer is not None
    assert chosen.optimizer.opt.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-4)
    assert notices == ["the learning rate schedule has ended"]


def test_it_is_the_same_throughout_and_the_trainer_is_as_it_was(swarm: hivenb.Swarm) -> None:
    model = Scheduled()
    used = trainer(strategy(swarm, 16), max_epochs=2)
    used.fit(model, loader(64, 8))
    assert model.seen == [8, 8]
    assert type(used) is Trainer
    assert used.estimated_stepping_batches == 16  # Lightning's own: outside of a training, nothing is changed


def test_a_trainer_of_ones_own_stays_one(swarm: hivenb.Swarm) -> None:
    class Own(Trainer):
        @property
        def estimated_stepping_batches(self) -> float:
            return 2 * super().estimated_stepping_batches

    seen: list[Any] = []

    class Looks(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen.append((isinstance(trainer, Own), type(trainer).__name__, trainer.estimated_stepping_batches))

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    Own(strategy=strategy(swarm, 16), max_epochs=1, callbacks=[Looks()], **quiet).fit(TinyModel(), loader(64, 8))
    assert seen == [(True, "Own", 8)]


BY_HAND: dict[str, Any] = {
    "passes times batches": lambda trainer: trainer.max_epochs * 8,
    "steps of the Trainer": lambda trainer: trainer.max_epochs * 8 // trainer.accumulate_grad_batches,
    "its batches in a pass": lambda trainer: trainer.max_epochs * trainer.num_training_batches,
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("counted", BY_HAND)
def test_who_counts_batches_is_told_at_once_what_to_count(swarm: hivenb.Swarm, schedule: str, counted: str) -> None:
    class Asked(Scheduled):
        def configure_optimizers(self) -> Any:
            _ = (
                self.trainer.num_training_batches
                if self.trainer.train_dataloader
                else self.trainer.fit_loop.setup_data()
            )
            return super().configure_optimizers()

    _, _, said = fit(
        swarm, Asked(schedule, BY_HAND[counted]), loader(64, 8), 32, max_epochs=2, accumulate_grad_batches=2
    )
    assert len(said) == 1
    assert "batches of this peer" in said[0]
    assert "there are about 4 of them" in said[0]
    assert "self.trainer.estimated_stepping_batches" in said[0]


def test_who_counts_epochs_of_the_swarm_is_left_alone(swarm: hivenb.Swarm) -> None:
    for count in (lambda _: 8, lambda trainer: 3 * trainer.estimated_stepping_batches):
        _, rate, said = fit(swarm, Scheduled("a closure", count), loader(64, 8), 16, max_epochs=2)
        assert said == []
    assert rate == pytest.approx(1 - 8 / 24)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(TensorDataset(*samples(64)))


@pytest.mark.parametrize(
    ("data", "kwargs"),
    [(loader(64, 8), {"max_epochs": -1}), (DataLoader(Stream(), batch_size=8), {"max_epochs": 1})],
    ids=["no end", "a stream"],
)
def test_what_cannot_be_known_is_said(swarm: hivenb.Swarm, data: Any, kwargs: Any) -> None:
    class Stops(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.should_stop = trainer.global_step >= 4

    model = Scheduled()
    _, rate, said = fit(swarm, model, data, 16, callbacks=[Stops()], **kwargs)
    assert model.total == float("inf")
    assert rate == 1.0
    assert len(said) == 1
    assert "is infinite" in said[0]
    assert "Give max_epochs or max_steps" in said[0]


def test_several_passes_that_only_max_steps_ends_are_known(swarm: hivenb.Swarm) -> None:
    chosen, rate, said = fit(swarm, Scheduled(), loader(64, 8), 8, max_epochs=-1, max_steps=24)
    assert (chosen.hivemind_epoch, rate, said) == (24, 0.0, [])


def test_a_stream_with_an_end_is_known(swarm: hivenb.Swarm) -> None:
    chosen, rate, said = fit(swarm, Scheduled(), DataLoader(Stream(), batch_size=8), 16, max_steps=8)
    assert (chosen.hivemind_epoch, rate, said) == (4, 0.0, [])


def test_batches_of_another_size_than_the_data_says_are_said(swarm: hivenb.Swarm) -> None:
    def pairs(batch: Any) -> Any:
        x, y = torch.utils.data.default_collate(batch)
        return torch.cat([x, x]), torch.cat([y, y])

    data = DataLoader(TensorDataset(*samples(64)), batch_size=8, collate_fn=pairs)
    _, _, said = fit(swarm, Scheduled(), data, 32, max_epochs=1)
    assert [text for text in said if "Give HivemindStrategy(batch_size=16)" in text] == said != []


# -- without a swarm -----------------------------------------------------------------------------------------------


@given(
    batches=st.integers(1, 30),
    in_batch=st.integers(1, 9),
    missing=st.integers(0, 8),
    passes=st.integers(1, 6),
    every=st.integers(1, 4),
    target=st.integers(1, 60),
    most=st.integers(0, 200),
)
def test_epochs_are_those_that_a_peer_alone_makes(
    batches: int, in_batch: int, missing: int, passes: int, every: int, target: int, most: int
) -> None:
    """Against each batch of each pass, one by one."""
    total = batches * in_batch - missing % in_batch
    epochs = gathered = steps = pending = 0
    for number in range(passes * batches):
        is_last = (number + 1) % batches == 0
        pending += in_batch - (missing % in_batch if is_last else 0)
        if (number % batches + 1) % every == 0 or is_last:
            steps, gathered, pending = steps + 1, gathered + pending, 0
            if gathered >= target:
                epochs, gathered = epochs + 1, 0
            if steps == most:
                break
    assert epochs_in(Pass(batches, in_batch, total), steps, every, target) == max(1, epochs)


def test_very_many_passes_are_not_walked() -> None:
    assert epochs_in(Pass(8, 8, 64), 8_000_000_000, 1, 16) == 4_000_000_000


class Unequal(BatchSampler):
    """Batches of one sample and of three."""

    def __init__(self) -> None:
        pass

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0], [1, 2, 3])

    def __len__(self) -> int:
        return 2


class MostlyOfOne(BatchSampler):
    """As many tokens in each batch: many of one long text, and one of many short ones."""

    def __init__(self) -> None:
        pass

    def __iter__(self) -> Iterator[list[int]]:
        yield from [[index] for index in range(49)] + [[*range(49, 60)]]

    def __len__(self) -> int:
        return 50


class OfBatches(Dataset[Any]):
    """Takes the indices of a whole batch at once."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, indices: list[int]) -> Any:
        return torch.zeros(len(indices), 4)


DATA = TensorDataset(*samples(60))
LISTED = [samples(8), samples(8), samples(4)]


@pytest.mark.parametrize(
    ("data", "batches", "expected"),
    [
        (DataLoader(DATA, batch_size=8), 8, Pass(8, 8, 60)),
        (DataLoader(DATA, batch_size=8), 7, Pass(7, 8, 56)),
        (DataLoader(DATA, batch_size=8, drop_last=True), 7, Pass(7, 8, 56)),
        (DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 8, False)), 8, Pass(8, 8, 60)),
        (DataLoader(TensorDataset(*samples(4)), batch_sampler=Unequal()), 2, Pass(2, 2, 4)),
        (DataLoader(DATA, batch_sampler=MostlyOfOne()), 50, Pass(50, 1, 60)),
        (DataLoader(LISTED, batch_size=None), 3, Pass(3, 8, 24)),
        (LISTED, 3, Pass(3, 8, 24)),
        (DataLoader(Stream(), batch_size=8), float("inf"), Pass(float("inf"), 8, float("inf"))),
        (iter(LISTED), float("inf"), None),
        (DataLoader(DATA, sampler=BatchSampler(SequentialSampler(DATA), 8, False), batch_size=None), 8, Pass(8, 8, 60)),
        (DataLoader(DATA, sampler=BatchSampler(SequentialSampler(DATA), 8, True), batch_size=None), 7, Pass(7, 8, 56)),
        (DataLoader(OfBatches(), sampler=Unequal(), batch_size=None), 2, None),
        (DataLoader(Stream(), batch_size=None), float("inf"), None),
    ],
)
def test_a_pass_is_what_the_data_says(data: Any, batches: float, expected: Pass | None) -> None:
    assert pass_over([data], batches, None) == expected
    assert pass_over([data], batches, 3) == Pass(batches, 3, 3 * batches)


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size"])
@pytest.mark.parametrize(
    "sizes", [[(64, 8), (20, 4)], [(20, 4), (64, 8)], [(7, 2), (64, 8), (60, 16)], [(8, 8), (160, 8)]], ids=str
)
def test_of_several_loaders_all_samples_are_reckoned_with_as_they_are_counted(mode: Any, sizes: Any) -> None:
    combined, count = CombinedLoader([loader(*one) for one in sizes], mode), SampleCount()
    counted = []
    for batch, _, _ in combined:
        count.look_at(batch, None, combined.iterables)
        counted.append(count.in_batch)
    through = pass_over(combined.flattened, len(counted), None, is_cycled=mode == "max_size_cycle")
    assert through is not None
    assert through == Pass(len(counted), counted[0], sum(counted))
    for target in (4, 32):
        epochs, gathered = 0, 0
        for samples_in_batch in counted:
            gathered += samples_in_batch
            if gathered >= target:
                epochs, gathered = epochs + 1, 0
        assert abs(epochs_in(through, len(counted), 1, target) - epochs) <= 1


def test_of_several_loaders_one_of_which_is_not_known_nothing_is() -> None:
    assert pass_over([loader(64, 8), DataLoader(Stream(), batch_size=None)], 8, None) is None
    assert pass_over([], 8, None) is None


@pytest.mark.parametrize(
    ("sizes", "mode", "epochs"),
    [
        ([(64, 8), (64, 4)], "min_size", 2),
        ([(16, 8), (64, 8)], "max_size_cycle", 4),
        ([(16, 8), (48, 8)], "max_size", 2),
    ],
)
def test_a_schedule_for_several_loaders_ends_with_training(
    swarm: hivenb.Swarm, sizes: Any, mode: Any, epochs: int
) -> None:
    class OfTwo(Scheduled):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch["last"], batch_idx)

    data = CombinedLoader({name: loader(*size) for name, size in zip(("first", "last"), sizes, strict=True)}, mode)
    chosen, rate, said = fit(swarm, OfTwo(), data, 32, max_epochs=1)
    assert (chosen.hivemind_epoch, rate, said) == (epochs, 0.0, [])


@pytest.mark.parametrize("max_epochs", [-1, 3])
def test_a_schedule_of_a_number_that_stands_for_no_end_is_refused(max_epochs: int) -> None:
    scheduler = CosineAnnealingLR(torch.optim.SGD(TinyModel().parameters(), 0.1), T_max=-1)
    steps: Any = EstimatedSteps(SimpleNamespace())
    with pytest.raises(MisconfigurationException, match=r"made for -1 steps: .*Give max_epochs=.*estimated_step") as e:
        steps.check(SimpleNamespace(max_epochs=max_epochs), [scheduler])
    assert ("trainer.max_epochs is -1" in str(e.value)) is (max_epochs == -1)


def test_a_batch_size_that_was_found_after_the_estimate_is_no_other_than_the_data_says(
    swarm: hivenb.Swarm, tmp_path: Any
) -> None:
    class Found(Scheduled):
        batch_size = 4

        def train_dataloader(self) -> Any:
            return loader(64, self.batch_size)

        def val_dataloader(self) -> Any:
            return loader(8, self.batch_size)

        def on_train_start(self) -> None:
            pass  # asks no other time

    model, finds = Found(), BatchSizeFinder(steps_per_trial=1, init_val=4, max_trials=2)
    chosen, rate, said = fit(swarm, model, None, 16, max_epochs=2, callbacks=[finds], default_root_dir=tmp_path)
    assert model.batch_size == 8
    assert (chosen.hivemind_epoch, rate, said) == (8, 0.0, [])


def test_a_copy_of_a_strategy_borrows_the_same_swarm(swarm: hivenb.Swarm) -> None:
    """Whoever copies a Trainer, or a loop that has one, copies it; also one that has trained."""
    chosen = strategy(swarm, 16)
    copied = copy.deepcopy(chosen)
    assert copied.dht is swarm.dht
    assert copied.options == chosen.options
    model = Scheduled()
    used = trainer(chosen, max_epochs=1)
    used.fit(model, loader(64, 8))
    again = copy.deepcopy(used)
    assert again.strategy.estimated_steps is not chosen.estimated_steps
    other = Scheduled()
    again.fit_loop.max_epochs = 2
    again.fit(other, loader(64, 8))
    assert again.strategy.hivemind_epoch == 4
    assert model.total == 4
