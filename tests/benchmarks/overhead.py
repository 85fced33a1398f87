"""Measures what the strategy adds to a step of one peer, against Lightning's single-device strategy.

Several Trainers take turns, some steps each, so that whatever else the machine does hits all of them alike; the median
step counts. Each has a process of its own, and so the allocator as it comes, or as the strategy sets it. A real step: a
perceptron of so many parameters computes, which does least with each of them, or the convolutions of VGG-11
(https://arxiv.org/abs/1409.1556), which do more. Each batch is a swarm epoch of its own, or 16 are; the latter is seen
beside a plain Trainer that accumulates as many.

    python tests/benchmarks/overhead.py --json overhead.json
    python tests/benchmarks/overhead.py --full          # 100 million parameters, too
"""

from __future__ import annotations

import logging
import math
import multiprocessing as mp
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from bench_peer import QUIET, Endless
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from swarm_bench import machine, parser, say, table, write_json
from thread_time import Spent, spent
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hivenb.strategy import HivemindStrategy

LOOPBACK: dict[str, Any] = {"host_maddrs": ["/ip4/127.0.0.1/tcp/0"], "nat_port_map": False, "auto_nat": False}
BATCH, LAYERS = 32, 4
#: Batches of a longer swarm epoch, and steps of a turn: a multiple of it, so that each has whole epochs.
MANY, TURN = 16, 16
#: Steps of each Trainer that do not count.
WARM_UP = 16


#: Channels of each layer of VGG-11; None halves the picture.
VGG_11 = (64, None, 128, None, 256, 256, None, 512, 512, None, 512, 512, None)


def perceptron(parameters: int) -> nn.Module:
    """Square layers with about so many parameters together."""
    width = math.isqrt(parameters // LAYERS)
    layers = (module for _ in range(LAYERS) for module in (nn.Linear(width, width), nn.ReLU()))
    return nn.Sequential(Spread(width), *layers)


def convolutions() -> nn.Module:
    """9.2 million parameters, for pictures of 32 x 32 points."""
    layers: list[nn.Module] = [Spread(3, 32, 32)]
    channels = 3
    for found in VGG_11:
        if found is None:
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(channels, found, 3, padding=1), nn.ReLU()]
            channels = found
    return nn.Sequential(*layers)


class Spread(nn.Module):
    """Makes so many numbers of the one of each sample."""

    def __init__(self, *shape: int):
        super().__init__()
        self._shape = shape

    def forward(self, batch: Tensor) -> Tensor:
        return batch.view(-1, *(1 for _ in self._shape)).expand(-1, *self._shape)


class Trained(LightningModule):
    def __init__(self, layers: nn.Module):
        super().__init__()
        self.layers = layers

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Turns:
    """Lets several processes go on in turn, one at a time.

    :param context: in which they are made
    """

    def __init__(self, context: Any, count: int):
        self._changed = context.Condition()
        self._there = context.Array("b", [True] * count, lock=False)
        self._whose = context.Value("i", 0, lock=False)

    def wait(self, own: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._whose.value == own)

    def hand_over(self, own: int) -> None:
        with self._changed:
            following = [(own + i) % len(self._there) for i in range(1, len(self._there) + 1)]
            self._whose.value = next((other for other in following if self._there[other]), own)
            self._changed.notify_all()

    def leave(self, own: int) -> None:
        self._there[own] = False
        if self._whose.value == own:
            self.hand_over(own)


class Timed(Callback):
    """Measures whole turns, and hands over after each."""

    def __init__(self, turns: Turns, own: int, count: int):
        self._turns, self._own, self._count = turns, own, count
        self._began = Spent()
        self.spent: list[Spent] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % TURN == 0:
            now = spent()
            if batch_idx > 0:
                if batch_idx > WARM_UP:
                    self.spent.append(now - self._began)
                if len(self.spent) == self._count:
                    trainer.should_stop = True
                    raise StopIteration
                self._turns.hand_over(self._own)
            self._turns.wait(self._own)
            self._began = spent()


@dataclass(frozen=True)
class Row:
    """One way to train one model.

    :param model: what is trained
    :param seconds: of a step, in each turn, by the clock
    :param computing: and on a core, in the thread that trains, whatever else the machine does
    :param ratio: median over all turns of this one's step to that of the plain Trainer next to it, by the clock
    :param ratio_computing: the same on a core
    """

    model: str
    parameters: int
    who: str
    against: str
    seconds: list[float]
    computing: list[float]
    ratio: float
    ratio_computing: float


def contestants() -> dict[str, tuple[str, Callable[[], dict[str, Any]]]]:
    """Who takes turns, each with whom it is compared to and the arguments of its Trainer."""

    def swarm(target: int, run_id: str, **kwargs: Any) -> dict[str, Any]:
        return {"strategy": HivemindStrategy(target, run_id, **LOOPBACK, **kwargs)}

    plain, accumulating = "Lightning, a step each batch", f"Lightning, a step in {MANY} batches"
    return {
        plain: (plain, lambda: {"strategy": SingleDeviceStrategy("cpu")}),
        "hivenb, an epoch each batch": (plain, lambda: swarm(BATCH, "each")),
        accumulating: (
            accumulating,
            lambda: {"strategy": SingleDeviceStrategy("cpu"), "accumulate_grad_batches": MANY},
        ),
        f"hivenb, an epoch in {MANY} batches": (accumulating, lambda: swarm(BATCH * MANY, "many")),
        f"hivenb, {MANY} batches, reuse_grad_buffers": (
            accumulating,
            lambda: swarm(BATCH * MANY, "reuse", reuse_grad_buffers=True),
        ),
    }


def train(make: Callable[[], nn.Module], who: str, own: int, turns: Turns, turns_each: int, told: Any) -> None:
    """In a process of its own: take turns with the others, and tell what they took."""
    for name in ("hivemind", "lightning", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    clock = Timed(turns, own, turns_each)
    try:
        trainer = Trainer(max_epochs=-1, callbacks=[clock], **QUIET, **contestants()[who][1]())
        trainer.fit(Trained(make()), DataLoader(Endless(BATCH), batch_size=None))
        told.send(clock.spent)
    finally:
        turns.leave(own)


def measure(name: str, make: Callable[[], nn.Module], turns_each: int) -> list[Row]:
    parameters = sum(parameter.numel() for parameter in make().parameters())
    chosen, context = contestants(), mp.get_context("spawn")
    turns, found = Turns(context, len(chosen)), {}
    for own, who in enumerate(chosen):
        found[who], told = context.Pipe(duplex=False)
        context.Process(target=train, args=(make, who, own, turns, turns_each, told)).start()
        told.close()  # so that the end of one that tells nothing is seen
    taken = {who: pipe.recv() for who, pipe in found.items()}
    seconds = {who: [turn.wall / TURN for turn in turns_of] for who, turns_of in taken.items()}
    computing = {who: [turn.computing / TURN for turn in turns_of] for who, turns_of in taken.items()}

    def ratio(of: dict[str, list[float]], who: str, against: str) -> float:
        return statistics.median(a / b for a, b in zip(of[who], of[against], strict=True))

    return [
        Row(
            name,
            parameters,
            who,
            against,
            seconds[who],
            computing[who],
            ratio(seconds, who, against),
            ratio(computing, who, against),
        )
        for who, (against, _) in chosen.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--parameters", type=int, nargs="+", default=[1_000_000, 10_000_000])
    options.add_argument("--turns", type=int, default=15, help=f"of {TURN} steps, for each Trainer")
    options.add_argument("--full", action="store_true", help="also 100 million parameters")
    options.add_argument(
        "--no-convolutions", action="store_true", help="perceptrons alone: a step of the others is long"
    )
    given = options.parse_args(arguments)
    sizes = [*given.parameters, *([100_000_000] if given.full else [])]
    if given.quick:
        sizes, given.turns = [10_000], 3
    models: list[tuple[str, Callable[[], nn.Module]]] = [("perceptron", partial(perceptron, size)) for size in sizes]
    if not given.quick and not given.no_convolutions:
        models.append(("convolutions", convolutions))
    print(machine())
    rows: list[Row] = []
    for name, make in models:
        say(f"{name} ...")
        rows += measure(name, make, given.turns)
    cells = [
        [
            row.model,
            row.parameters,
            row.who,
            f"{1000 * statistics.median(row.seconds):.2f}",
            f"{row.ratio:.3f}",
            f"{1000 * statistics.median(row.computing):.2f}",
            f"{row.ratio_computing:.3f}",
        ]
        for row in rows
    ]
    print(table(["model", "parameters", "", "step, ms", "ratio", "on a core, ms", "ratio"], cells))
    print("The ratio is to Lightning with as many batches a step, in the turn next to it; one thread.")
    write_json(given.json, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
