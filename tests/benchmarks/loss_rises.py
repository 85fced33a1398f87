"""Counts how often advice blames a change of options that has done no harm, and finds one that has.

Trainings of digits in plain torch, in one process, each of its own: another optimizer, learning rate, schedule, batch
size, share of wrong labels, dropout and order of the data. A step of the optimizer stands for a swarm epoch, and its
loss goes into a history, in several points an epoch or one for several epochs, as a run writes it. The history is asked
after each epoch, as a dashboard asks it: one alarm at any moment counts.

Changes without harm, five at random epochs of a run: none at all, gradients in half precision, twice the batch. Changes
with harm, one in a run: gradients that are an epoch late, gradients with noise as of a coarse codec, an eighth of the
batch, a schedule with a larger learning rate. Beside each, the same training goes on without its change, which says
what harm it did.

    python tests/benchmarks/loss_rises.py --json loss_rises.json
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from swarm_bench import machine, parser, say, table, write_json

from hivenb import tasks
from hivenb.figures.history import History, OptionChange
from hivenb.figures.loss_rises import LEARNING_RATE, loss_rises
from hivenb.options import Options

#: Changes of one run without harm.
CHANGES = 5

HARMLESS = ("nothing", "half precision", "twice the batch")
HARMFUL = ("late gradients", "coarse gradients", "an eighth of the batch", "larger learning rate")

#: The option that stands for each.
_OPTIONS: dict[str, tuple[str, Any, Any]] = {
    "nothing": ("matchmaking_time", 5.0, 10.0),
    "half precision": ("grad_compression", "none", "float16"),
    "twice the batch": ("target_batch_size", 64, 128),
    "late gradients": ("delay_compensation", True, False),
    "coarse gradients": ("grad_compression", "none", "uniform8bit"),
    "an eighth of the batch": ("target_batch_size", 64, 8),
    "larger learning rate": ("scheduler_fn", None, lambda optimizer: None),
}


@dataclass(frozen=True)
class Case:
    """What a training is made of.

    :param wrong: share of wrong labels
    :param order: of the samples: "drawn" with repetition, in shuffled "passes", or in passes in which the classes are
      "sorted" in part
    :param points: of the history for each epoch; fewer than one where a point stands for several
    """

    seed: int
    optimizer: str
    rate: float
    schedule: str
    batch: int
    wrong: float
    dropout: float
    order: str
    points: float
    epochs: int

    @classmethod
    def drawn(cls, seed: int, epochs: int, schedule: str | None = None) -> Case:
        """One at random, the same for a seed each time."""
        chosen = random.Random(seed)
        optimizer = chosen.choice(["SGD", "Adam", "AdamW"])
        rates = [0.01, 0.05, 0.2] if optimizer == "SGD" else [3e-4, 1e-3, 5e-3]
        return cls(
            seed,
            optimizer,
            chosen.choice(rates),
            schedule or chosen.choice(["constant", "restarts", "one cycle", "triangles"]),
            chosen.choice([8, 32, 128, 512]),
            chosen.choice([0.0, 0.1, 0.3]),
            chosen.choice([0.0, 0.3]),
            chosen.choice(["drawn", "passes", "sorted"]),
            chosen.choice([1 / 3, 1.0, 4.0]),
            epochs,
        )


@dataclass(frozen=True)
class Outcome:
    """What came of a training.

    :param changes: at which epochs, and what
    :param alarms: at which epochs a change was blamed first
    :param harm: by which factor the loss of the next 50 epochs was higher than without the change, and than that of the
      50 before; 1 for a run without harm
    """

    case: Case
    changes: tuple[tuple[int, str], ...]
    alarms: tuple[int, ...]
    harm: tuple[float, float] = (1.0, 1.0)

    @property
    def is_harmed(self) -> bool:
        """Whether the loss has risen by half, against both."""
        return min(self.harm) >= 1.5


class Training:
    """One training, epoch by epoch.

    :param case: what it is made of
    """

    def __init__(self, case: Case):
        torch.manual_seed(case.seed)
        images, labels = tasks.digits(seed=case.seed).train.dataset.tensors
        self._case, self._images = case, images.flatten(1)
        self._generator = torch.Generator().manual_seed(case.seed)
        is_wrong = torch.rand(len(labels), generator=self._generator) < case.wrong
        self._labels = torch.where(is_wrong, torch.randint(10, labels.shape, generator=self._generator), labels)
        width = self._images.shape[1]
        self._model = torch.nn.Sequential(
            torch.nn.Linear(width, 48), torch.nn.ReLU(), torch.nn.Dropout(case.dropout), torch.nn.Linear(48, 10)
        )
        settings = {"momentum": 0.9} if case.optimizer == "SGD" else {}
        self._optimizer = getattr(torch.optim, case.optimizer)(self._model.parameters(), lr=case.rate, **settings)
        self._schedule = _scheduler(case, self._optimizer)
        self._left: list[int] = []
        self._late: list[torch.Tensor] | None = None
        self._is_late, self._noise, self._half, self._batch = False, 0.0, False, case.batch

    def change(self, what: str) -> None:
        """Go on with it from the next epoch on."""
        self._half = self._half or what == "half precision"
        self._is_late = self._is_late or what == "late gradients"
        self._noise = 4.0 if what == "coarse gradients" else self._noise
        self._batch = {"twice the batch": 2 * self._batch, "an eighth of the batch": max(1, self._batch // 8)}.get(
            what, self._batch
        )
        if what == "larger learning rate":
            for group in self._optimizer.param_groups:
                group["lr"] *= 10

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return float(self._optimizer.param_groups[0]["lr"])

    def epoch(self) -> list[float]:
        """Make a step; the losses of four parts of its batch, or of fewer where it has fewer samples."""
        parts = self._next().chunk(4)
        losses, sums = [], [torch.zeros_like(one) for one in self._model.parameters()]
        for part in parts:
            loss = torch.nn.functional.cross_entropy(self._model(self._images[part]), self._labels[part])
            losses.append(float(loss.detach()))
            for total, one in zip(sums, torch.autograd.grad(loss, list(self._model.parameters())), strict=True):
                total += one / len(parts)
        if self._half:
            sums = [one.half().float() for one in sums]
        if self._noise:
            sums = [one + self._noise * one.std() * torch.randn(one.shape, generator=self._generator) for one in sums]
        now, self._late = (self._late or sums, sums) if self._is_late else (sums, None)
        for parameter, one in zip(self._model.parameters(), now, strict=True):
            parameter.grad = one
        self._optimizer.step()
        if self._schedule is not None:
            self._schedule.step()
        return losses

    def _next(self) -> torch.Tensor:
        count, case = len(self._images), self._case
        if case.order == "drawn":
            return torch.randint(count, (self._batch,), generator=self._generator)
        while len(self._left) < self._batch:
            order = torch.randperm(count, generator=self._generator)
            if case.order == "sorted":  # such as by length: what is alike comes together, more or less
                order = order[torch.argsort(self._labels[order] + 4 * torch.rand(count, generator=self._generator))]
            self._left += order.tolist()
        chosen, self._left = self._left[: self._batch], self._left[self._batch :]
        return torch.tensor(chosen)


def _scheduler(case: Case, optimizer: torch.optim.Optimizer) -> Any:
    schedulers, length = torch.optim.lr_scheduler, random.Random(case.seed).randint(30, 150)
    made: dict[str, Callable[[], Any]] = {
        "constant": lambda: None,
        "restarts": lambda: schedulers.CosineAnnealingWarmRestarts(optimizer, length),
        "one cycle": lambda: schedulers.OneCycleLR(optimizer, 2 * case.rate, total_steps=case.epochs + 1),
        "triangles": lambda: schedulers.CyclicLR(
            optimizer, case.rate / 5, case.rate, step_size_up=length // 2, cycle_momentum=False
        ),
    }
    return made[case.schedule]()


# -- what advice makes of it -----------------------------------------------------------------------------------------


class Written:
    """A history that a training writes into as a run does, and which options are in force."""

    def __init__(self, points: float):
        self._points, self.history, self.options = points, History(), Options(target_batch_size=64)
        self._taken: list[float] = []
        self._rate: float | None = None
        self._now = 0.0

    def change(self, what: str) -> None:
        """Mark a change; one that has been made already is made once more the other way round."""
        name, before, after = _OPTIONS[what]
        now = getattr(self.options, name)
        new = before if now == after else after
        if name == "matchmaking_time":
            new = now + 1.0
        self.options = self.options.replace(**{name: new})
        self._now += 0.01
        self.history.mark("option", name, time=self._now, change=OptionChange(name, now, new))

    def write(self, epoch: int, losses: Sequence[float], rate: float) -> None:
        """Note an epoch; of its end, that is."""
        self._taken += losses
        per = max(1, round(len(losses) / self._points))
        while len(self._taken) >= per:
            part, self._taken = self._taken[:per], self._taken[per:]
            self._now += 0.1
            self.history.record("loss", sum(part) / len(part), epoch=epoch, time=self._now)
        if self._rate is not None and rate != self._rate:
            if LEARNING_RATE not in self.history.snapshot().series:
                self.history.record(LEARNING_RATE, self._rate, epoch=epoch, time=self._now)
            self.history.record(LEARNING_RATE, rate, epoch=epoch, time=self._now)
        self._rate = rate


def train(case: Case, changes: Sequence[tuple[int, str]]) -> Outcome:
    """One training, with changes at some epochs, and what advice says of it."""
    training, written = Training(case), Written(case.points)
    planned, blamed, losses, alarms = dict(changes), set[float](), list[float](), list[int]()
    for epoch in range(case.epochs):
        if (what := planned.get(epoch)) is not None:
            training.change(what)
            written.change(what)
        parts = training.epoch()
        losses.append(sum(parts) / len(parts))
        written.write(epoch, parts, training.rate)
        for rise in loss_rises(written.history.snapshot(), written.options):
            if rise.event.time not in blamed:
                blamed.add(rise.event.time)
                alarms.append(epoch)
    return Outcome(case, tuple(changes), tuple(alarms), _harm(case, changes, losses))


def _harm(case: Case, changes: Sequence[tuple[int, str]], losses: Sequence[float]) -> tuple[float, float]:
    at, what = changes[0]
    if what not in HARMFUL:
        return 1.0, 1.0
    twin = Training(case)
    without = [sum(parts) / len(parts) for parts in (twin.epoch() for _ in range(at + 50))]
    after = sum(losses[at : at + 50])
    return after / sum(without[at:]), after / sum(losses[at - 50 : at])


def without_harm(seed: int, epochs: int) -> Outcome:
    """A run of many changes that do no harm."""
    case, chosen = Case.drawn(seed, epochs), random.Random(seed)
    places = sorted(chosen.sample(range(20, epochs - 10), CHANGES))
    return train(case, [(place, chosen.choice(HARMLESS)) for place in places])


def with_harm(seed: int, epochs: int, what: str) -> Outcome:
    """A run of one change that may do harm, in the second half, where the loss is low."""
    chosen = random.Random(seed)
    case = Case.drawn(seed, epochs, schedule="constant")
    rate = chosen.choice([0.2, 0.5] if case.optimizer == "SGD" else [0.005, 0.02])  # lower ones stand any of it
    case = replace(case, batch=chosen.choice([32, 128, 512]), rate=rate)
    return train(case, [(chosen.randrange(epochs // 2, epochs - 60), what)])


# -- all of it -------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--runs", type=int, default=20, help="without harm, and of each harmful change")
    options.add_argument("--first-seed", type=int, default=0)
    options.add_argument("--epochs", type=int, default=500)
    given = options.parse_args(arguments)
    if given.quick:
        given.runs, given.epochs = 2, 150
    print(machine())
    torch.set_num_threads(1)
    seeds = range(given.first_seed, given.first_seed + given.runs)
    quiet, loud = [], []
    for seed in seeds:
        quiet.append(without_harm(seed, given.epochs))
        say(quiet[-1])
    for what in HARMFUL:
        for seed in seeds:
            loud.append(with_harm(seed, given.epochs, what))
            say(loud[-1])
    of = sum(len(one.changes) for one in quiet)
    print(table(["without harm", "runs", "changes", "blamed"], [_quiet(schedule, quiet) for schedule in _of(quiet)]))
    print(f"{sum(len(one.alarms) for one in quiet)} of {of} changes without harm were blamed")
    heads = [
        "with harm",
        "runs",
        "loss up by half",
        "of these found",
        "epochs, median",
        "longest",
        "found of the others",
    ]
    print(table(heads, [_loud(what, [one for one in loud if one.changes[0][1] == what]) for what in HARMFUL]))
    write_json(given.json, [*quiet, *loud])
    return 0


def _of(quiet: Sequence[Outcome]) -> list[str]:
    return sorted({one.case.schedule for one in quiet})


def _quiet(schedule: str, quiet: Sequence[Outcome]) -> list[Any]:
    ones = [one for one in quiet if one.case.schedule == schedule]
    return [schedule, len(ones), sum(len(one.changes) for one in ones), sum(len(one.alarms) for one in ones)]


def _loud(what: str, ones: Sequence[Outcome]) -> list[Any]:
    harmed = [one for one in ones if one.is_harmed]
    after = [one.alarms[0] - one.changes[0][0] + 1 for one in harmed if one.alarms]
    others = [one for one in ones if not one.is_harmed]
    return [
        what,
        len(ones),
        len(harmed),
        len(after),
        f"{median(after):g}" if after else "-",
        max(after, default="-"),
        f"{sum(bool(one.alarms) for one in others)} of {len(others)}",
    ]


if __name__ == "__main__":
    raise SystemExit(main())
